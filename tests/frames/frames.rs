//! Python frames as read in real processes of every CPython at hand.
