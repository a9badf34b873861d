//! The disk as a vhost-user back-end, with a correct front-end and with a hostile one.

mod front_end;
mod hostile;
mod refused;
mod ring;
