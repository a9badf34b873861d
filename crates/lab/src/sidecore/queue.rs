//! A bounded queue between two threads: one adds items, the other takes them.

use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// An index on a cache line of its own, because each end writes one of the two.
#[repr(align(64))]
struct Index(AtomicUsize);

struct Shared<T> {
    /// Each slot is locked by one end at a time, never by both: a lock is one uncontended
    /// exchange.
    slots: Box<[Mutex<Option<T>>]>,
    /// Number of items taken so far.
    head: Index,
    /// Number of items added so far.
    tail: Index,
}

impl<T> Shared<T> {
    fn slot(&self, number: usize) -> Option<&Mutex<Option<T>>> {
        let index = number.checked_rem(self.slots.len())?;
        self.slots.get(index)
    }
}

/// The end that adds items.
pub struct Producer<T>(Arc<Shared<T>>);

/// The end that takes items.
pub struct Consumer<T>(Arc<Shared<T>>);

impl<T> fmt::Debug for Producer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Producer").finish_non_exhaustive()
    }
}

impl<T> fmt::Debug for Consumer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Consumer").finish_non_exhaustive()
    }
}

/// Creates a queue of at most `capacity` items, which is at least one.
pub fn queue<T>(capacity: usize) -> (Producer<T>, Consumer<T>) {
    let slots = (0..capacity.max(1)).map(|_| Mutex::new(None)).collect();
    let shared = Arc::new(Shared {
        slots,
        head: Index(AtomicUsize::new(0)),
        tail: Index(AtomicUsize::new(0)),
    });
    (Producer(Arc::clone(&shared)), Consumer(shared))
}

impl<T> Producer<T> {
    /// Adds an item.
    ///
    /// # Errors
    /// The queue is full. Returns the item.
    pub fn push(&mut self, item: T) -> Result<(), T> {
        let tail = self.0.tail.0.load(Ordering::Relaxed);
        let head = self.0.head.0.load(Ordering::Acquire);
        if tail.wrapping_sub(head) >= self.0.slots.len() {
            return Err(item);
        }
        if let Some(slot) = self.0.slot(tail) {
            *slot.lock().unwrap_or_else(PoisonError::into_inner) = Some(item);
        }
        self.0.tail.0.store(tail.wrapping_add(1), Ordering::Release);
        Ok(())
    }

    /// Takes the newest item back; `None` if the queue is empty, or its other end still exists.
    pub fn take_back(&mut self) -> Option<T> {
        let shared = Arc::get_mut(&mut self.0)?;
        let (head, tail) = (*shared.head.0.get_mut(), *shared.tail.0.get_mut());
        if head == tail {
            return None;
        }
        let newest = tail.wrapping_sub(1);
        *shared.tail.0.get_mut() = newest;
        let slot = shared.slot(newest)?;
        slot.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

impl<T> Consumer<T> {
    /// Takes the oldest item; `None` if the queue is empty.
    pub fn pop(&mut self) -> Option<T> {
        let head = self.0.head.0.load(Ordering::Relaxed);
        if head == self.0.tail.0.load(Ordering::Acquire) {
            return None;
        }
        let slot = self.0.slot(head)?;
        let item = slot.lock().unwrap_or_else(PoisonError::into_inner).take();
        self.0.head.0.store(head.wrapping_add(1), Ordering::Release);
        item
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn items_arrive_once_and_in_order_between_two_threads() {
        const ITEMS: u32 = 20_000;
        let (mut producer, mut consumer) = queue(3);
        let other = std::thread::spawn(move || {
            let mut found = Vec::new();
            while found.len() < ITEMS as usize {
                match consumer.pop() {
                    Some(item) => found.push(item),
                    None => std::thread::yield_now(),
                }
            }
            (found, consumer.pop())
        });
        for number in 0..ITEMS {
            let mut item = number;
            while let Err(back) = producer.push(item) {
                item = back;
                std::thread::yield_now();
            }
        }
        let (found, rest) = other.join().unwrap();
        assert_eq!((found, rest), ((0..ITEMS).collect(), None));
    }

    #[test]
    fn a_full_queue_returns_the_item() {
        let (mut producer, mut consumer) = queue(2);
        assert_eq!(
            [1, 2, 3].map(|item| producer.push(item)),
            [Ok(()), Ok(()), Err(3)]
        );
        assert_eq!(consumer.pop(), Some(1));
        assert_eq!(producer.push(3), Ok(()));
        assert_eq!([2, 3].map(Some), [consumer.pop(), consumer.pop()]);
        assert_eq!(consumer.pop(), None);
    }

    #[test]
    fn items_come_back_newest_first_after_the_consumer_ended() {
        let (mut producer, mut consumer) = queue(2);
        for item in [1, 2, 3] {
            while producer.push(item).is_err() {
                assert_eq!(consumer.pop(), Some(1));
            }
        }
        assert_eq!(producer.take_back(), None, "the consumer may take it");
        drop(consumer);
        assert_eq!(
            [3, 2].map(Some),
            [producer.take_back(), producer.take_back()]
        );
        assert_eq!(producer.take_back(), None);
        assert_eq!(producer.push(4), Ok(()));
        assert_eq!(producer.take_back(), Some(4));
    }
}
