//! Why the memory of a handle must stay on its physical pages.

use std::fmt;

/// What was done with memory that reaches its physical pages past its addresses, or that would not outlive a change of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Anchor {
    /// A descriptor of it was given out, which another process may have.
    Exported,
    /// A descriptor of a range of it was given out, for a network adapter (dma-buf).
    Descriptor,
    /// It is bound to a multicast object.
    Multicast,
    /// It is bound to a logical endpoint.
    Endpoint,
    /// It is mapped into a sparse array.
    Array,
    /// `CU_POINTER_ATTRIBUTE_SYNC_MEMOPS` was set on it, as those do who let an adapter read it.
    SyncMemops,
    /// The processor may use it, without any call.
    HostAccess,
}

impl Anchor {
    const ALL: [Self; 7] = [
        Self::Exported,
        Self::Descriptor,
        Self::Multicast,
        Self::Endpoint,
        Self::Array,
        Self::SyncMemops,
        Self::HostAccess,
    ];
}

impl fmt::Display for Anchor {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Self::Exported => "a descriptor of it was given out",
            Self::Descriptor => "a network adapter may have it",
            Self::Multicast => "it is bound to a multicast object",
            Self::Endpoint => "it is bound to a logical endpoint",
            Self::Array => "it is mapped into a sparse array",
            Self::SyncMemops => "CU_POINTER_ATTRIBUTE_SYNC_MEMOPS was set on it",
            Self::HostAccess => "the processor may use it",
        })
    }
}

/// How often each was done, calls that are under way included. Counted, because one call that fails must not take away what
/// another, that succeeded, put there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Anchors([u32; Anchor::ALL.len()]);

impl Anchors {
    pub fn add(&mut self, anchor: Anchor) {
        let count = &mut self.0[anchor as usize];
        *count = count.saturating_add(1);
    }

    /// Why the memory must stay on its pages, if it must.
    pub fn first(&self) -> Option<Anchor> {
        Anchor::ALL.into_iter().find(|anchor| self.0[*anchor as usize] != 0)
    }

    /// The call that [`add`](Self::add) was for failed.
    pub fn withdraw(&mut self, anchor: Anchor) {
        let count = &mut self.0[anchor as usize];
        *count = count.saturating_sub(1);
    }
}
