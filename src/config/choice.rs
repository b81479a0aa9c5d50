//! Settings that take one word of a few.

/// Declares the type of a one-word setting together with its words, so that no word is spelled twice.
macro_rules! choice {
    ($(#[$doc:meta])* $name:ident { $($(#[$item_doc:meta])* $item:ident = $word:literal,)+ }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub enum $name {
            $($(#[$item_doc])* $item,)+
        }

        impl $name {
            /// Every word, joined the way the settings table shows them.
            pub(crate) const WORDS: &str = $crate::choice::joined!($($word)+);

            /// The word for this choice.
            pub fn word(self) -> &'static str {
                match self { $(Self::$item => $word,)+ }
            }

            pub(crate) fn from_word(word: &str) -> Option<Self> {
                match word { $($word => Some(Self::$item),)+ _ => None }
            }
        }
    };
}

/// `"a" "b"` → `"a|b"`, at compile time.
macro_rules! joined {
    ($first:literal $($word:literal)*) => { concat!($first, $("|", $word),*) };
}
use joined;

choice! {
    /// Who serves an allocation (`GPUPOOL_MODE`).
    Mode {
        /// Blocks come from the pool.
        #[default]
        Pool = "pool",
        /// The driver first, the pool when it says OUT_OF_MEMORY.
        Spill = "spill",
        /// Every block is managed memory, its stripes kept where the placement puts them.
        Managed = "managed",
        /// The driver alone; every call is logged.
        Trace = "trace",
        /// Nothing is intercepted.
        Off = "off",
    }
}

choice! {
    /// Who serves requests under `GPUPOOL_MIN_SIZE` (`GPUPOOL_SMALL`).
    Small {
        /// The pool, which packs them into frames of their own.
        #[default]
        Pool = "pool",
        /// The driver.
        Driver = "driver",
    }
}

choice! {
    /// Which place a block goes to (`GPUPOOL_PLACEMENT`).
    Placement {
        /// The program's GPU until it is full, then peers by link speed, then the nearest host node.
        #[default]
        LocalFirst = "local-first",
        /// Spread chunk by chunk over every GPU.
        Interleave = "interleave",
        /// The GPU with the most room.
        MostFree = "most-free",
    }
}

choice! {
    /// What a free waits for (`GPUPOOL_FREE`).
    Free {
        /// The device, before the call returns, as the driver's own free does.
        #[default]
        Strict = "strict",
        /// Nothing; the wait happens when the memory is about to be reused.
        Lazy = "lazy",
    }
}

choice! {
    /// Who serves pinned host memory (`GPUPOOL_PINNED`).
    Pinned {
        /// The pool of pinned memory.
        #[default]
        Pool = "pool",
        /// The driver.
        Off = "off",
    }
}

choice! {
    /// Whose numbers `cuMemGetInfo` and `cuDeviceTotalMem` give (`GPUPOOL_MEMINFO`).
    MemInfo {
        /// The pool's.
        #[default]
        Pool = "pool",
        /// The GPU's, as without gpupool.
        Device = "device",
    }
}

choice! {
    /// When managed memory is moved to where it was placed (`GPUPOOL_PREFETCH`).
    Prefetch {
        /// Never; it is where it was placed once somebody has touched it.
        Off = "off",
        /// When it is allocated.
        #[default]
        Alloc = "alloc",
        /// Then, and before a launch that names it.
        Launch = "launch",
    }
}

choice! {
    /// A thing that is done or not (`GPUPOOL_MANAGED_ADVICE`, `GPUPOOL_METRICS`).
    Toggle {
        /// Not done.
        #[default]
        Off = "off",
        /// Done.
        On = "on",
    }
}

choice! {
    /// Whether memory of the pool goes to another place while the program runs (`GPUPOOL_MOVE`).
    Move {
        /// It stays where it was first put, unless the program moves it.
        #[default]
        Off = "off",
        /// What is used most comes near, if that pays.
        Auto = "auto",
        /// At every opportunity, whatever it costs: for tests.
        Stress = "stress",
    }
}

choice! {
    /// Whether GPUs that only lend memory keep their clocks (`GPUPOOL_LENDERS`).
    Lenders {
        /// A GPU on which nobody has a context is left to itself.
        #[default]
        Asleep = "asleep",
        /// A helper process of the user's holds a context there.
        Awake = "awake",
    }
}

choice! {
    /// What happens to a context on a GPU where none is meant to be (`GPUPOOL_CONTEXTS`).
    Contexts {
        /// It is made, and reported.
        #[default]
        Warn = "warn",
        /// The call that would make it fails.
        Deny = "deny",
    }
}

choice! {
    /// A setting that decides for itself unless told (`GPUPOOL_SOFT_OOM`, `GPUPOOL_PEER_RDMA`, `GPUPOOL_SUMMARY`).
    Switch {
        /// Decided from what the process turns out to be.
        #[default]
        Auto = "auto",
        /// Always.
        On = "on",
        /// Never.
        Off = "off",
    }
}
