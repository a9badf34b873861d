//! Invalidation interfaces that punish misuse, for the tests of the layers above.

mod delayed;
mod failing;

pub use delayed::Delayed;
pub use failing::{Failing, Misbehaviour};
