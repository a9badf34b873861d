/*
 * Loads a kernel and starts it: kexec KERNEL INITRAMFS COMMAND-LINE. For the guests of kexec cases,
 * whose busybox has no such command.
 */
#include <fcntl.h>
#include <linux/reboot.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <termios.h>
#include <unistd.h>

int main(int argc, char **argv)
{
	int kernel, initramfs;

	if (argc != 4) {
		fprintf(stderr, "usage: kexec KERNEL INITRAMFS COMMAND-LINE\n");
		return 2;
	}
	kernel = open(argv[1], O_RDONLY);
	initramfs = open(argv[2], O_RDONLY);
	if (kernel < 0 || initramfs < 0) {
		perror(kernel < 0 ? argv[1] : argv[2]);
		return 1;
	}
	if (syscall(SYS_kexec_file_load, kernel, initramfs, strlen(argv[3]) + 1, argv[3], 0UL)) {
		perror("kexec_file_load");
		return 1;
	}
	sync();
	/* The output so far must have left this kernel. */
	tcdrain(STDOUT_FILENO);
	syscall(SYS_reboot, LINUX_REBOOT_MAGIC1, LINUX_REBOOT_MAGIC2, LINUX_REBOOT_CMD_KEXEC, NULL);
	perror("reboot");
	return 1;
}
