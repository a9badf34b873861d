#!/usr/bin/env python3
"""Naive transcription of EIOVAR Fig. 2, with the additions of Linux 3.4, over a sorted list.

Reads sequences from standard input and prints one line per operation:

    space LO HI          creates a new, empty space; prints nothing
    seed C LO HI ...     adds allocated ranges; prints nothing
    a PAGES ORDER LIMIT  allocates; prints "LO STEPS C", or "x C" if nothing fits
    f LO HI              frees; prints "f C", or "r C" if the range is not allocated

C is the first page of the cached range, or - for none.
"""
import bisect
import sys

LAST_32BIT = 0xFFFFF


class Space:
    def __init__(self, lo, hi):
        self.lo, self.hi = lo, hi
        self.los, self.his = [], []  # First and last pages of the ranges, sorted.
        self.cache = None
        self.cached_limit = min(hi, LAST_32BIT)

    def insert(self, lo, hi):
        at = bisect.bisect_left(self.los, lo)
        self.los.insert(at, lo)
        self.his.insert(at, hi)

    def walk(self, at, top, pages, order):
        """Searches downwards from the gap between range `at` - 1 and `top`.

        Returns the first page, or None, and the number of iterations.
        """
        n = 0
        while True:
            floor = self.his[at - 1] + 1 if at > 0 else self.lo
            lo = (top - pages) >> order << order
            if top - pages >= 0 and lo >= floor:
                return lo, n
            if at == 0:
                return None, n
            at -= 1
            top = min(top, self.los[at])
            n += 1

    def alloc(self, pages, order, limit):
        limit = min(limit, self.hi)
        lo, steps = None, 0
        if limit == self.cached_limit and self.cache is not None:
            at = self.los.index(self.cache)
            lo, steps = self.walk(at, self.cache, pages, order)
        if lo is None:
            lo, more = self.walk(len(self.los), limit + 1, pages, order)
            steps += more
        if lo is None:
            return None
        self.insert(lo, lo + pages - 1)
        if limit == self.cached_limit:
            self.cache = lo
        return lo, steps

    def free(self, lo, hi):
        if lo not in self.los:
            return False
        at = self.los.index(lo)
        if self.his[at] != hi:
            return False
        if self.cache is not None and lo >= self.cache:
            following = self.los[at + 1] if at + 1 < len(self.los) else self.cached_limit
            self.cache = following if following < self.cached_limit else None
        del self.los[at], self.his[at]
        return True


def main():
    space, out = None, []
    for line in sys.stdin:
        word = line.split()
        number = [int(w) if w != "-" else None for w in word[1:]]
        if word[0] == "space":
            space = Space(*number)
            continue
        if word[0] == "seed":
            ranges = number[1:]
            for lo, hi in zip(ranges[::2], ranges[1::2]):
                space.insert(lo, hi)
            space.cache = number[0]
            continue
        if word[0] == "a":
            found = space.alloc(*number)
            answer = "x" if found is None else "%d %d" % found
        else:
            answer = "f" if space.free(*number) else "r"
        out.append("%s %s" % (answer, "-" if space.cache is None else space.cache))
    print("\n".join(out))


main()
