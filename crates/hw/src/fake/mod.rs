//! Invalidation interfaces that punish misuse, for tests of the layers above.

mod delayed;
mod failing;

pub use delayed::Delayed;
pub use failing::{Failing, Misbehaviour};
