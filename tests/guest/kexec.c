/*
 * Loads a kernel and starts it: kexec [--crash] KERNEL INITRAMFS COMMAND-LINE. With --crash, the
 * running kernel crashes, so that it shuts no device down. For the guests of the cases `kexec` and
 * `kdump`, whose busybox has no such command.
 */
#include <fcntl.h>
#include <linux/kexec.h>
#include <linux/reboot.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <termios.h>
#include <unistd.h>

/* Returns only if it fails. */
static void start(void)
{
	syscall(SYS_reboot, LINUX_REBOOT_MAGIC1, LINUX_REBOOT_MAGIC2, LINUX_REBOOT_CMD_KEXEC, NULL);
	perror("reboot");
}

/* Returns only if it fails. */
static void crash(void)
{
	int trigger = open("/proc/sysrq-trigger", O_WRONLY);

	if (trigger < 0 || write(trigger, "c", 1) != 1)
		perror("/proc/sysrq-trigger");
}

int main(int argc, char **argv)
{
	unsigned long flags = 0;
	int kernel, initramfs;

	if (argc > 1 && !strcmp(argv[1], "--crash")) {
		flags = KEXEC_FILE_ON_CRASH;
		argc--;
		argv++;
	}
	if (argc != 4) {
		fprintf(stderr, "usage: kexec [--crash] KERNEL INITRAMFS COMMAND-LINE\n");
		return 2;
	}
	kernel = open(argv[1], O_RDONLY);
	initramfs = open(argv[2], O_RDONLY);
	if (kernel < 0 || initramfs < 0) {
		perror(kernel < 0 ? argv[1] : argv[2]);
		return 1;
	}
	if (syscall(SYS_kexec_file_load, kernel, initramfs, strlen(argv[3]) + 1, argv[3], flags)) {
		perror("kexec_file_load");
		return 1;
	}
	sync();
	/* The output so far must have left this kernel. */
	tcdrain(STDOUT_FILENO);
	if (flags)
		crash();
	else
		start();
	return 1;
}
