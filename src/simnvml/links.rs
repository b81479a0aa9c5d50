//! Links as NVML tells of them.

use crate::ffi::Answer;
use crate::machine::{Gpu, settings};
use nvml_wrapper_sys::bindings::*;
use simmachine::links::Link;
use std::ffi::c_uint;

/// The common ancestor of two GPUs over PCIe. Between GPUs with NVLink the matrix does not say it.
pub fn level(link: Link) -> c_uint {
    match link {
        Link::Same => nvmlGpuLevel_enum_NVML_TOPOLOGY_INTERNAL,
        Link::Pix => nvmlGpuLevel_enum_NVML_TOPOLOGY_SINGLE,
        Link::Pxb => nvmlGpuLevel_enum_NVML_TOPOLOGY_MULTIPLE,
        Link::Phb => nvmlGpuLevel_enum_NVML_TOPOLOGY_HOSTBRIDGE,
        Link::Node | Link::Nvlink(_) => nvmlGpuLevel_enum_NVML_TOPOLOGY_NODE,
        Link::Sys => nvmlGpuLevel_enum_NVML_TOPOLOGY_SYSTEM,
    }
}

/// `nvmlDeviceGetP2PStatus`: read, write, NVLink, atomics, PCIe.
pub fn status(link: Link, what: c_uint) -> Answer<c_uint> {
    if link == Link::Same {
        return Err(nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT);
    }
    let (able, otherwise) = match what {
        nvmlGpuP2PCapsIndex_enum_NVML_P2P_CAPS_INDEX_READ | nvmlGpuP2PCapsIndex_enum_NVML_P2P_CAPS_INDEX_WRITE => {
            (link.is_peer(), nvmlGpuP2PStatus_enum_NVML_P2P_STATUS_CHIPSET_NOT_SUPPORTED)
        }
        nvmlGpuP2PCapsIndex_enum_NVML_P2P_CAPS_INDEX_NVLINK | nvmlGpuP2PCapsIndex_enum_NVML_P2P_CAPS_INDEX_ATOMICS => {
            (link.is_nvlink(), nvmlGpuP2PStatus_enum_NVML_P2P_STATUS_NOT_SUPPORTED)
        }
        nvmlGpuP2PCapsIndex_enum_NVML_P2P_CAPS_INDEX_PCI => {
            (link.is_peer() && !link.is_nvlink(), nvmlGpuP2PStatus_enum_NVML_P2P_STATUS_NOT_SUPPORTED)
        }
        _ => return Err(nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT),
    };
    Ok(if able { nvmlGpuP2PStatus_enum_NVML_P2P_STATUS_OK } else { otherwise })
}

/// Where an NVLink ends.
#[derive(Clone, Copy)]
pub enum End {
    Gpu(usize),
    Switch,
}

/// Where a GPU's NVLink with this number ends; `None` for one that is not connected. Links to several GPUs that are more
/// together than a GPU has go through a switch.
pub fn end(gpu: Gpu, link: c_uint) -> Answer<Option<End>> {
    let links = &settings()?.links;
    let ends: Vec<usize> = (0..links.len())
        .flat_map(|to| match links.between(gpu.index, to) {
            Link::Nvlink(count) => std::iter::repeat_n(to, usize::from(count)),
            _ => std::iter::repeat_n(to, 0),
        })
        .collect();
    if ends.is_empty() {
        return Err(nvmlReturn_enum_NVML_ERROR_NOT_SUPPORTED);
    }
    if link >= NVML_NVLINK_MAX_LINKS {
        return Err(nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT);
    }
    if ends.len() > NVML_NVLINK_MAX_LINKS as usize {
        return Ok(Some(End::Switch));
    }
    Ok(ends.get(link as usize).copied().map(End::Gpu))
}

/// What is at the other end of a link; NOT_SUPPORTED where the link is not connected.
pub fn active(gpu: Gpu, link: c_uint) -> Answer<End> {
    end(gpu, link)?.ok_or(nvmlReturn_enum_NVML_ERROR_NOT_SUPPORTED)
}

pub fn capability(what: c_uint) -> Answer<c_uint> {
    if what >= nvmlNvLinkCapability_enum_NVML_NVLINK_CAP_COUNT {
        return Err(nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT);
    }
    Ok(c_uint::from(what != nvmlNvLinkCapability_enum_NVML_NVLINK_CAP_SLI_BRIDGE))
}
