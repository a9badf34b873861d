// SPDX-License-Identifier: GPL-2.0-only
/*
 * Writes pages to a disk, and frees each one in the completion of its write, as dm-crypt does with
 * its copies. The next owner of the page writes other bytes into it, still in the completion. A
 * device that reads the page again shows by the bytes which owner's memory it reaches. Loaded for
 * one test and then removed.
 */
#include <linux/bio.h>
#include <linux/blkdev.h>
#include <linux/completion.h>
#include <linux/gfp.h>
#include <linux/mm.h>
#include <linux/module.h>

/* Bytes of the page that is written, and of its next owner. */
#define REUSE_WRITTEN	0x57
#define REUSE_SECRET	0x5e

static char *device = "/dev/vda";
module_param(device, charp, 0444);
MODULE_PARM_DESC(device, "the disk, whose first page is overwritten");

static unsigned int writes = 500;
module_param(writes, uint, 0444);
MODULE_PARM_DESC(writes, "number of writes, one at a time");

static unsigned int order;
module_param(order, uint, 0444);
MODULE_PARM_DESC(order, "order of the compound page that a write uses (default: 0)");

struct reuse {
	struct completion done;
	struct page *page;
	unsigned int reused;
	blk_status_t status;
};

/* In a softirq: the driver has unmapped the page. */
static void reuse_end(struct bio *bio)
{
	struct reuse *reuse = bio->bi_private;
	struct page *next;

	reuse->status = bio->bi_status;
	__free_pages(reuse->page, order);
	/* The allocator of this CPU returns the page that was freed last. */
	next = alloc_pages(GFP_ATOMIC | __GFP_COMP, order);
	if (next) {
		reuse->reused += next == reuse->page;
		memset(page_address(next), REUSE_SECRET, PAGE_SIZE << order);
		__free_pages(next, order);
	}
	complete(&reuse->done);
}

static int reuse_write(struct block_device *bdev, struct reuse *reuse)
{
	struct bio *bio;

	reuse->page = alloc_pages(GFP_KERNEL | __GFP_COMP, order);
	if (!reuse->page)
		return -ENOMEM;
	memset(page_address(reuse->page), REUSE_WRITTEN, PAGE_SIZE << order);
	init_completion(&reuse->done);
	bio = bio_alloc(bdev, 1, REQ_OP_WRITE | REQ_SYNC, GFP_KERNEL);
	bio->bi_private = reuse;
	bio->bi_end_io = reuse_end;
	__bio_add_page(bio, reuse->page, PAGE_SIZE << order, 0);
	submit_bio(bio);
	wait_for_completion(&reuse->done);
	bio_put(bio);
	return blk_status_to_errno(reuse->status);
}

static int __init reuse_init(void)
{
	struct reuse reuse = {};
	struct file *file;
	unsigned int n;
	int err = 0;

	if (order > MAX_PAGE_ORDER)
		return -EINVAL;
	file = bdev_file_open_by_path(device, BLK_OPEN_WRITE, NULL, NULL);
	if (IS_ERR(file))
		return PTR_ERR(file);
	for (n = 0; n < writes && !err; n++)
		err = reuse_write(file_bdev(file), &reuse);
	bdev_fput(file);
	pr_info("dma_reuse: %s: %u writes, %u pages had another owner at the end of a write\n",
		device, n, reuse.reused);
	return err;
}

static void __exit reuse_exit(void)
{
}

module_init(reuse_init);
module_exit(reuse_exit);
MODULE_DESCRIPTION("Reuses pages in the completions of their writes");
MODULE_LICENSE("GPL");
