//! What the nodes of a graph use.

use crate::{CuResult, Driver, Function, Graph, Node};
use cudarc::driver::sys::{CUDA_KERNEL_NODE_PARAMS_v2, CUDA_MEMCPY3D, CUDA_MEMSET_NODE_PARAMS};
use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;

/// A part of a graph that uses memory.
#[derive(Debug)]
pub enum Part {
    /// A kernel, and its arguments as a launch has them: the node owns them, so they are read at once.
    Kernel {
        /// Which one.
        function: Function,
        /// `kernelParams`.
        parameters: *mut *mut c_void,
        /// `extra`.
        extra: *mut *mut c_void,
    },
    /// A copy (`CUDA_MEMCPY3D`).
    Copy(Box<MaybeUninit<CUDA_MEMCPY3D>>),
    /// A fill: its address, and the bytes from its first to its last.
    Fill(u64, u64),
}

/// `CUgraphNodeType`: those that name memory, and one of other nodes.
const KERNEL: c_int = 0;
const COPY: c_int = 1;
const FILL: c_int = 2;
const CHILD: c_int = 4;
/// Functions of the host, nothing, events, semaphores, and memory that the graph has for itself.
const OTHERS: [c_int; 8] = [3, 5, 6, 7, 8, 9, 10, 11];
/// Graphs in graphs that are looked into.
const DEEPEST: u32 = 16;

impl Driver {
    /// Tells what the nodes of a graph use, those of graphs in it included. NOT_SUPPORTED where it has a node of another kind than
    /// these, or the driver cannot tell.
    ///
    /// # Safety
    /// The graph lives, and nobody changes it meanwhile.
    pub unsafe fn parts_of(&self, graph: Graph, each: &mut dyn FnMut(Part)) -> Result<(), CuResult> {
        // SAFETY: as for this function.
        unsafe { self.parts_at(graph, DEEPEST, each) }
    }

    /// # Safety
    /// As for [`parts_of`](Self::parts_of).
    unsafe fn parts_at(&self, graph: Graph, depth: u32, each: &mut dyn FnMut(Part)) -> Result<(), CuResult> {
        let list = self.cuGraphGetNodes.ok_or(CuResult::NOT_SUPPORTED)?;
        let mut count = 0;
        // SAFETY: the caller vouches for the graph; without a list only the number is written, which is a local.
        unsafe { list(graph, std::ptr::null_mut(), &raw mut count) }.ok()?;
        let mut nodes: Vec<Option<Node>> = vec![None; count];
        // SAFETY: the caller vouches for the graph, and the list has room for as many as are said.
        unsafe { list(graph, nodes.as_mut_ptr(), &raw mut count) }.ok()?;
        for node in nodes.into_iter().take(count).flatten() {
            // SAFETY: the node is one of the graph, which nobody changes.
            unsafe { self.part(node, depth, each) }?;
        }
        Ok(())
    }

    /// # Safety
    /// The node's graph lives, and nobody changes it meanwhile.
    unsafe fn part(&self, node: Node, depth: u32, each: &mut dyn FnMut(Part)) -> Result<(), CuResult> {
        let mut kind = -1;
        let kind_of = self.cuGraphNodeGetType.ok_or(CuResult::NOT_SUPPORTED)?;
        // SAFETY: the caller vouches for the node, and the output is a local.
        unsafe { kind_of(node, &raw mut kind) }.ok()?;
        match kind {
            KERNEL => {
                let tell = self.cuGraphKernelNodeGetParams_v2.ok_or(CuResult::NOT_SUPPORTED)?;
                let mut told = MaybeUninit::<CUDA_KERNEL_NODE_PARAMS_v2>::zeroed();
                // SAFETY: the caller vouches for the node, and the output is a local.
                unsafe { tell(node, told.as_mut_ptr()) }.ok()?;
                // SAFETY: the structure is of numbers and pointers, for which all bits are values, and was zero before the call.
                let told = unsafe { told.assume_init() };
                let kernel = if told.func.is_null() { told.kern.cast() } else { told.func };
                let function = Function::from_raw(kernel).ok_or(CuResult::NOT_SUPPORTED)?;
                each(Part::Kernel { function, parameters: told.kernelParams, extra: told.extra });
            }
            COPY => {
                let tell = self.cuGraphMemcpyNodeGetParams.ok_or(CuResult::NOT_SUPPORTED)?;
                let mut told = Box::new(MaybeUninit::zeroed());
                // SAFETY: the caller vouches for the node, and the output lives.
                unsafe { tell(node, told.as_mut_ptr()) }.ok()?;
                each(Part::Copy(told));
            }
            FILL => {
                let tell = self.cuGraphMemsetNodeGetParams.ok_or(CuResult::NOT_SUPPORTED)?;
                let mut told = MaybeUninit::<CUDA_MEMSET_NODE_PARAMS>::zeroed();
                // SAFETY: the caller vouches for the node, and the output is a local.
                unsafe { tell(node, told.as_mut_ptr()) }.ok()?;
                // SAFETY: the structure is of numbers, for which all bits are values, and was zero before the call.
                let told = unsafe { told.assume_init() };
                let row = (told.elementSize as u64).saturating_mul(told.width as u64);
                let before = (told.pitch as u64).saturating_mul((told.height as u64).saturating_sub(1));
                each(Part::Fill(told.dst, before.saturating_add(row)));
            }
            CHILD => {
                let tell = self.cuGraphChildGraphNodeGetGraph.ok_or(CuResult::NOT_SUPPORTED)?;
                let mut child = None;
                // SAFETY: the caller vouches for the node, and the output is a local.
                unsafe { tell(node, &raw mut child) }.ok()?;
                let depth = depth.checked_sub(1).ok_or(CuResult::NOT_SUPPORTED)?;
                if let Some(child) = child {
                    // SAFETY: the child is the node's, and lives as long.
                    unsafe { self.parts_at(child, depth, each) }?;
                }
            }
            kind if OTHERS.contains(&kind) => {}
            _ => return Err(CuResult::NOT_SUPPORTED),
        }
        Ok(())
    }
}
