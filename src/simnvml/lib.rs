//! A `libnvidia-ml.so.1` without a GPU: it tells of the machine that the simulated driver plays (`simcuda`), of all its
//! processes. What it does not have it does not export, or answers NOT_SUPPORTED.
//!
//! It reads the driver's variables, so that both speak of the same machine, and `SIMCUDA_EVENTS` (see `simcuda/README.md`).

#![allow(non_upper_case_globals, reason = "NVML's own names, in patterns")]

mod device;
mod events;
mod ffi;
mod links;
mod machine;

use events::EventSet;
use ffi::{Answer, In, Out, answer};
use machine::Gpu;
use nvml_wrapper_sys::bindings::*;
use simmachine::{bus_id, name, uuid_text};
use std::ffi::{c_char, c_int, c_uint, c_ulonglong};

/// The release of the measured driver, which this one plays.
const RELEASE: &str = "580.159.04";
const NVML_RELEASE: &str = "13.580.159.04";

/// Exports functions of NVML by name; what they do runs only in between `nvmlInit` and `nvmlShutdown`.
macro_rules! exports {
    ($($name:ident($($arg:ident: $type:ty),* $(,)?) $body:block)*) => {$(
        /// # Safety
        /// As of NVML's function: each pointer is null or points to what the interface names.
        #[allow(non_snake_case, reason = "NVML's own names")]
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($arg: $type),*) -> nvmlReturn_t {
            answer(|| {
                machine::settings()?;
                $body
            })
        }
    )*};
}

/// Exports the ways to begin and end.
macro_rules! always {
    ($($name:ident($($arg:ident: $type:ty),*) $body:block)*) => {$(
        /// # Safety
        /// None beyond those of NVML's function.
        #[allow(non_snake_case, reason = "NVML's own names")]
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($arg: $type),*) -> nvmlReturn_t {
            answer(|| $body)
        }
    )*};
}

always! {
    nvmlInit() { machine::init() }
    nvmlInit_v2() { machine::init() }
    nvmlInitWithFlags(_flags: c_uint) { machine::init() }
    nvmlShutdown() { machine::shutdown() }
}

/// # Safety
/// None: it takes a number.
#[allow(non_snake_case, reason = "NVML's own name")]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlErrorString(code: nvmlReturn_t) -> *const c_char {
    ffi::error_text(code).as_ptr()
}

exports! {
    nvmlSystemGetDriverVersion(out: Out<c_char>, capacity: c_uint) { out.set_text(RELEASE, capacity) }
    nvmlSystemGetNVMLVersion(out: Out<c_char>, capacity: c_uint) { out.set_text(NVML_RELEASE, capacity) }
    nvmlSystemGetCudaDriverVersion(out: Out<c_int>) { out.set(machine::settings()?.driver) }
    nvmlSystemGetCudaDriverVersion_v2(out: Out<c_int>) { out.set(machine::settings()?.driver) }

    nvmlSystemGetConfComputeState(out: Out<nvmlConfComputeSystemState_t>) {
        let is_on = c_uint::from(machine::settings()?.confidential);
        // The environment, the feature, and its tools for developers, which are off.
        out.set(nvmlConfComputeSystemState_t { environment: 2 * is_on, ccFeature: is_on, devToolsMode: 0 })
    }

    // Which GPUs there are: all of the machine, whatever CUDA_VISIBLE_DEVICES says.
    nvmlDeviceGetCount(out: Out<c_uint>) { out.set(machine::settings()?.gpus.len() as c_uint) }
    nvmlDeviceGetCount_v2(out: Out<c_uint>) { out.set(machine::settings()?.gpus.len() as c_uint) }
    nvmlDeviceGetHandleByIndex(index: c_uint, out: Out<nvmlDevice_t>) { out.set(Gpu::by_index(index)?.handle()) }
    nvmlDeviceGetHandleByIndex_v2(index: c_uint, out: Out<nvmlDevice_t>) { out.set(Gpu::by_index(index)?.handle()) }
    nvmlDeviceGetHandleByUUID(text: In<c_char>, out: Out<nvmlDevice_t>) {
        let (wanted, machine) = (text.text()?, machine::settings()?.machine.as_deref());
        out.set(Gpu::find(|index| uuid_text(machine, index) == wanted)?.handle())
    }
    nvmlDeviceGetHandleByPciBusId(text: In<c_char>, out: Out<nvmlDevice_t>) { out.set(Gpu::by_bus_id(&text.text()?)?.handle()) }
    nvmlDeviceGetHandleByPciBusId_v2(text: In<c_char>, out: Out<nvmlDevice_t>) { out.set(Gpu::by_bus_id(&text.text()?)?.handle()) }
    nvmlDeviceGetIndex(device: nvmlDevice_t, out: Out<c_uint>) { out.set(Gpu::of(device)?.index as c_uint) }
    nvmlDeviceGetMinorNumber(device: nvmlDevice_t, out: Out<c_uint>) { out.set(Gpu::of(device)?.index as c_uint) }
    nvmlDeviceGetUUID(device: nvmlDevice_t, out: Out<c_char>, capacity: c_uint) {
        out.set_text(&uuid_text(machine::settings()?.machine.as_deref(), Gpu::of(device)?.index), capacity)
    }
    nvmlDeviceGetName(device: nvmlDevice_t, out: Out<c_char>, capacity: c_uint) {
        out.set_text(&name(Gpu::of(device)?.capacity()?), capacity)
    }
    nvmlDeviceGetPciInfo(device: nvmlDevice_t, out: Out<nvmlPciInfo_t>) { out.set(device::pci(Gpu::of(device)?.index)) }
    nvmlDeviceGetPciInfo_v2(device: nvmlDevice_t, out: Out<nvmlPciInfo_t>) { out.set(device::pci(Gpu::of(device)?.index)) }
    nvmlDeviceGetPciInfo_v3(device: nvmlDevice_t, out: Out<nvmlPciInfo_t>) { out.set(device::pci(Gpu::of(device)?.index)) }
    nvmlDeviceGetCudaComputeCapability(device: nvmlDevice_t, major: Out<c_int>, minor: Out<c_int>) {
        Gpu::of(device)?;
        major.set(9)?;
        minor.set(0)
    }
    nvmlDeviceGetMigMode(device: nvmlDevice_t, current: Out<c_uint>, pending: Out<c_uint>) {
        Gpu::of(device)?;
        current.set(0)?;
        pending.set(0)
    }

    // Memory and processes.
    nvmlDeviceGetMemoryInfo(device: nvmlDevice_t, out: Out<nvmlMemory_t>) {
        let (total, used) = Gpu::of(device)?.memory()?;
        out.set(nvmlMemory_t { total, free: total - used, used })
    }
    nvmlDeviceGetMemoryInfo_v2(device: nvmlDevice_t, out: Out<nvmlMemory_v2_t>) { device::memory_v2(device, out) }
    nvmlDeviceGetComputeRunningProcesses(device: nvmlDevice_t, count: Out<c_uint>, list: Out<device::ProcessV1>) {
        device::processes(device, count, list, |pid, bytes| device::ProcessV1 { pid, bytes })
    }
    nvmlDeviceGetComputeRunningProcesses_v2(device: nvmlDevice_t, count: Out<c_uint>, list: Out<nvmlProcessInfo_v2_t>) {
        device::processes(device, count, list, device::process_v2)
    }
    nvmlDeviceGetComputeRunningProcesses_v3(device: nvmlDevice_t, count: Out<c_uint>, list: Out<nvmlProcessInfo_v2_t>) {
        device::processes(device, count, list, device::process_v2)
    }
    nvmlDeviceGetGraphicsRunningProcesses_v3(device: nvmlDevice_t, count: Out<c_uint>, _list: Out<nvmlProcessInfo_v2_t>) {
        Gpu::of(device)?;
        count.set(0)
    }

    // Clocks, power, health.
    nvmlDeviceGetClockInfo(device: nvmlDevice_t, kind: c_uint, out: Out<c_uint>) { out.set(device::clock(Gpu::of(device)?.is_awake()?, kind)?) }
    nvmlDeviceGetMaxClockInfo(device: nvmlDevice_t, kind: c_uint, out: Out<c_uint>) {
        Gpu::of(device)?;
        out.set(device::clock(true, kind)?)
    }
    nvmlDeviceGetPerformanceState(device: nvmlDevice_t, out: Out<c_uint>) {
        Gpu::of(device)?;
        out.set(nvmlPStates_enum_NVML_PSTATE_0)
    }
    nvmlDeviceGetPowerUsage(device: nvmlDevice_t, out: Out<c_uint>) { out.set(device::power(Gpu::of(device)?.is_awake()?)) }
    nvmlDeviceGetPowerManagementLimit(device: nvmlDevice_t, out: Out<c_uint>) {
        Gpu::of(device)?;
        out.set(device::POWER_LIMIT)
    }
    nvmlDeviceGetEnforcedPowerLimit(device: nvmlDevice_t, out: Out<c_uint>) {
        Gpu::of(device)?;
        out.set(device::POWER_LIMIT)
    }
    nvmlDeviceGetTemperature(device: nvmlDevice_t, _sensor: c_uint, _out: Out<c_uint>) {
        Gpu::of(device)?;
        Err(nvmlReturn_enum_NVML_ERROR_NOT_SUPPORTED)
    }
    nvmlDeviceGetUtilizationRates(device: nvmlDevice_t, _out: Out<nvmlUtilization_t>) {
        Gpu::of(device)?;
        Err(nvmlReturn_enum_NVML_ERROR_NOT_SUPPORTED)
    }
    nvmlDeviceGetEccMode(device: nvmlDevice_t, current: Out<c_uint>, pending: Out<c_uint>) {
        Gpu::of(device)?;
        current.set(1)?;
        pending.set(1)
    }
    nvmlDeviceGetTotalEccErrors(device: nvmlDevice_t, kind: c_uint, _counter: c_uint, out: Out<c_ulonglong>) {
        let health = events::health(Gpu::of(device)?.index)?;
        out.set(match kind {
            nvmlMemoryErrorType_enum_NVML_MEMORY_ERROR_TYPE_CORRECTED => health.corrected,
            nvmlMemoryErrorType_enum_NVML_MEMORY_ERROR_TYPE_UNCORRECTED => health.uncorrected,
            _ => return Err(nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT),
        })
    }
    // From release 615 on, which the driver that this one plays is not.
    nvmlDeviceGetMemoryLimits_v1(device: nvmlDevice_t, out: Out<device::MemoryLimits>) {
        out.set(device::memory_limits(Gpu::of(device)?.index, out.get()?)?)
    }
    nvmlDeviceGetRemappedRows(
        device: nvmlDevice_t,
        corrected: Out<c_uint>,
        uncorrected: Out<c_uint>,
        pending: Out<c_uint>,
        failed: Out<c_uint>,
    ) {
        let health = events::health(Gpu::of(device)?.index)?;
        corrected.set(health.rows_corrected)?;
        uncorrected.set(health.rows_uncorrected)?;
        pending.set(c_uint::from(health.pending))?;
        failed.set(c_uint::from(health.failed))
    }

    nvmlDeviceGetGpuFabricInfo(device: nvmlDevice_t, out: Out<nvmlGpuFabricInfo_t>) {
        Gpu::of(device)?;
        let fabric = machine::settings()?.fabric;
        let (clusterUuid, cliqueId) = fabric.unwrap_or_default();
        let state = if fabric.is_some() { NVML_GPU_FABRIC_STATE_COMPLETED } else { NVML_GPU_FABRIC_STATE_NOT_SUPPORTED };
        out.set(nvmlGpuFabricInfo_t { clusterUuid, status: nvmlReturn_enum_NVML_SUCCESS, cliqueId, state: state as u8 })
    }

    // Events.
    nvmlDeviceGetSupportedEventTypes(device: nvmlDevice_t, out: Out<c_ulonglong>) {
        Gpu::of(device)?;
        out.set(events::SUPPORTED)
    }
    nvmlEventSetCreate(out: Out<nvmlEventSet_t>) { out.set(EventSet::create()) }
    nvmlDeviceRegisterEvents(device: nvmlDevice_t, types: c_ulonglong, set: nvmlEventSet_t) {
        events::register(set, Gpu::of(device)?.index, types)
    }
    nvmlEventSetWait_v2(set: nvmlEventSet_t, out: Out<nvmlEventData_t>, milliseconds: c_uint) {
        out.required()?;
        out.set(events::wait(set, milliseconds)?)
    }
    nvmlEventSetWait(set: nvmlEventSet_t, out: Out<events::DataV1>, milliseconds: c_uint) {
        out.required()?;
        out.set(events::wait(set, milliseconds)?.into())
    }
    nvmlEventSetFree(set: nvmlEventSet_t) { events::free_set(set) }

    // How the GPUs reach each other.
    nvmlDeviceGetTopologyCommonAncestor(a: nvmlDevice_t, b: nvmlDevice_t, out: Out<c_uint>) {
        out.set(links::level(Gpu::of(a)?.link_to(Gpu::of(b)?)?))
    }
    nvmlDeviceGetP2PStatus(a: nvmlDevice_t, b: nvmlDevice_t, what: c_uint, out: Out<c_uint>) {
        out.set(links::status(Gpu::of(a)?.link_to(Gpu::of(b)?)?, what)?)
    }
    nvmlDeviceGetNvLinkState(device: nvmlDevice_t, link: c_uint, out: Out<c_uint>) {
        out.set(c_uint::from(links::end(Gpu::of(device)?, link)?.is_some()))
    }
    nvmlDeviceGetNvLinkVersion(device: nvmlDevice_t, link: c_uint, out: Out<c_uint>) {
        links::active(Gpu::of(device)?, link)?;
        out.set(4)
    }
    nvmlDeviceGetNvLinkCapability(device: nvmlDevice_t, link: c_uint, what: c_uint, out: Out<c_uint>) {
        links::active(Gpu::of(device)?, link)?;
        out.set(links::capability(what)?)
    }
    nvmlDeviceGetNvLinkRemotePciInfo_v2(device: nvmlDevice_t, link: c_uint, out: Out<nvmlPciInfo_t>) {
        out.set(match links::active(Gpu::of(device)?, link)? {
            links::End::Gpu(index) => device::pci(index),
            links::End::Switch => device::switch_pci(),
        })
    }
    nvmlDeviceGetNvLinkRemoteDeviceType(device: nvmlDevice_t, link: c_uint, out: Out<c_uint>) {
        out.set(match links::active(Gpu::of(device)?, link)? {
            links::End::Gpu(_) => nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_GPU,
            links::End::Switch => nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_SWITCH,
        })
    }
}

impl Gpu {
    fn by_bus_id(text: &str) -> Answer<Self> {
        let wanted = text.to_ascii_uppercase();
        Self::find(|index| [4, 8].iter().any(|&digits| bus_id(index, digits) == wanted))
    }
}
