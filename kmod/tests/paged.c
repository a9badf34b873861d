// SPDX-License-Identifier: GPL-2.0-only
/* A range of memory that is contiguous for the CPU only. host.c includes this file. */

static struct {
	char *memory;
	struct page **pages;
	unsigned int count;
	/* Pages that were inserted into an area, or that are in a table. */
	unsigned int inserted, in_table;
} range;

void *vmap(struct page **pages, unsigned int count, unsigned long flags, int prot)
{
	CHECK(!range.memory);
	range.memory = aligned_alloc(PAGE_SIZE, count * PAGE_SIZE);
	range.pages = pages;
	range.count = count;
	return range.memory;
}

void vfree(void *memory)
{
	CHECK(memory && memory == range.memory);
	while (range.count--)
		free_pages_exact(range.pages[range.count], PAGE_SIZE);
	kvfree(range.pages);
	free(range.memory);
	range.memory = NULL;
}

bool is_vmalloc_addr(const void *memory)
{
	return range.memory && (size_t)((char *)memory - range.memory) < range.count * PAGE_SIZE;
}

struct page *vmalloc_to_page(const void *at)
{
	CHECK(is_vmalloc_addr(at));
	return range.pages[((char *)at - range.memory) / PAGE_SIZE];
}

int vm_insert_page(struct vm_area_struct *vma, unsigned long at, struct page *page)
{
	CHECK(page == range.pages[vma->vm_pgoff + (at - vma->vm_start) / PAGE_SIZE]);
	range.inserted++;
	return 0;
}

int sg_alloc_table_from_pages(struct sg_table *table, struct page **pages, unsigned int count,
			      unsigned int offset, unsigned long bytes, gfp_t gfp)
{
	CHECK(!offset && bytes == count * PAGE_SIZE);
	for (range.in_table = 0; range.in_table < count; range.in_table++)
		if (range.memory)
			CHECK(pages[range.in_table] == range.pages[range.in_table]);
	return 0;
}
