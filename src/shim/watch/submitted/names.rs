//! Functions of the driver that were looked at and submit nothing that could touch a pooled block.
//!
//! What counts is memory: a free has to wait for work that may still read or write the block, also for another context's that a
//! stream of the block's context waits for. So these are harmless besides questions
//! and what only changes the driver's books: events recorded by a context; what moves data of arrays, of frames and of buffers that belong to a graphics interface, which are never pooled; modules that
//! are loaded behind a question for a function; parts of graphs, which run when the graph is launched.
//!
//! Names are without the ending of a version or of a default stream (`_v2`, `_ptsz`). The functions before `_v2` that copy and
//! fill memory are not among them: they are hooked under none of their names. The lists that this was made from are cudarc's (CUDA
//! 13.0), the table of hooks, and the exports of libcuda 535, 550 and 555.

/// In the order of their letters.
#[rustfmt::skip] // One name a line would be 430 of them.
const HARMLESS: &[&str] = &[
    "cuArray3DGetDescriptor", "cuArrayDestroy", "cuArrayGetDescriptor", "cuArrayGetMemoryRequirements",
    "cuArrayGetPlane", "cuArrayGetSparseProperties", "cuCheckpointProcessCheckpoint",
    "cuCheckpointProcessGetRestoreThreadId", "cuCheckpointProcessGetState", "cuCheckpointProcessLock",
    "cuCheckpointProcessRestore", "cuCheckpointProcessUnlock", "cuCoredumpDeregisterCompleteCallback",
    "cuCoredumpDeregisterStartCallback", "cuCoredumpGetAttribute", "cuCoredumpGetAttributeGlobal",
    "cuCoredumpRegisterCompleteCallback", "cuCoredumpRegisterStartCallback", "cuCoredumpSetAttribute",
    "cuCoredumpSetAttributeGlobal", "cuCtxAttach", "cuCtxCreate", "cuCtxDestroy", "cuCtxDetach",
    "cuCtxDisablePeerAccess", "cuCtxEnablePeerAccess", "cuCtxFromGreenCtx", "cuCtxGetApiVersion",
    "cuCtxGetCacheConfig", "cuCtxGetCurrent", "cuCtxGetDevResource", "cuCtxGetDevice", "cuCtxGetExecAffinity",
    "cuCtxGetFlags", "cuCtxGetId", "cuCtxGetLimit", "cuCtxGetSharedMemConfig", "cuCtxGetStreamPriorityRange",
    "cuCtxPopCurrent", "cuCtxPushCurrent", "cuCtxRecordEvent", "cuCtxResetPersistingL2Cache", "cuCtxSetCacheConfig",
    "cuCtxSetCurrent", "cuCtxSetFlags", "cuCtxSetSharedMemConfig", "cuCtxSynchronize", 
    "cuDestroyExternalMemory", "cuDestroyExternalSemaphore", "cuDevResourceGenerateDesc", "cuDevSmResourceSplit",
    "cuDevSmResourceSplitByCount", "cuDeviceCanAccessPeer", "cuDeviceComputeCapability", "cuDeviceGet",
    "cuDeviceGetAttribute", "cuDeviceGetByPCIBusId", "cuDeviceGetCliqueCount", "cuDeviceGetCliqueInfo",
    "cuDeviceGetCount", "cuDeviceGetDefaultMemPool", "cuDeviceGetDevResource", "cuDeviceGetExecAffinitySupport",
    "cuDeviceGetFabricClusterUuid", "cuDeviceGetGraphMemAttribute", "cuDeviceGetHostAtomicCapabilities",
    "cuDeviceGetLuid", "cuDeviceGetMemPool", "cuDeviceGetName", "cuDeviceGetNvSciSyncAttributes",
    "cuDeviceGetP2PAtomicCapabilities", "cuDeviceGetP2PAttribute", "cuDeviceGetPCIBusId", "cuDeviceGetProperties",
    "cuDeviceGetTexture1DLinearMaxWidth", "cuDeviceGetUuid", "cuDeviceGraphMemTrim", "cuDevicePrimaryCtxGetState",
    "cuDevicePrimaryCtxRelease", "cuDevicePrimaryCtxReset", "cuDevicePrimaryCtxRetain",
    "cuDevicePrimaryCtxSetFlags", "cuDeviceRegisterAsyncNotification", "cuDeviceSetGraphMemAttribute",
    "cuDeviceSetMemPool", "cuDeviceTotalMem", "cuDeviceUnregisterAsyncNotification", "cuDriverGetVersion",
    "cuEGLApiInit", "cuEGLStreamConsumerAcquireFrame", "cuEGLStreamConsumerConnect",
    "cuEGLStreamConsumerConnectWithFlags", "cuEGLStreamConsumerDisconnect", "cuEGLStreamConsumerReleaseFrame",
    "cuEGLStreamProducerConnect", "cuEGLStreamProducerDisconnect", "cuEGLStreamProducerPresentFrame",
    "cuEGLStreamProducerReturnFrame", "cuEventCreate", "cuEventDestroy", "cuEventElapsedTime", "cuEventQuery",
    "cuEventSynchronize", "cuExternalMemoryGetMappedBuffer", "cuExternalMemoryGetMappedMipmappedArray",
    "cuFlushGPUDirectRDMAWrites", "cuFuncGetAttribute", "cuFuncGetModule", "cuFuncGetName", "cuFuncGetParamCount",
    "cuFuncGetParamInfo", "cuFuncIsLoaded", "cuFuncLoad", "cuFuncSetAttribute", "cuFuncSetBlockShape",
    "cuFuncSetCacheConfig", "cuFuncSetSharedMemConfig", "cuFuncSetSharedSize", "cuGLCtxCreate", "cuGLGetDevices",
    "cuGLInit", "cuGLMapBufferObject", "cuGLMapBufferObjectAsync", "cuGLRegisterBufferObject",
    "cuGLSetBufferObjectMapFlags", "cuGLUnmapBufferObject", "cuGLUnmapBufferObjectAsync",
    "cuGLUnregisterBufferObject", "cuGetErrorName", "cuGetErrorString", "cuGetExportTable", "cuGetProcAddress",
    "cuGraphAddBatchMemOpNode", "cuGraphAddChildGraphNode", "cuGraphAddDependencies", "cuGraphAddEmptyNode",
    "cuGraphAddEventRecordNode", "cuGraphAddEventWaitNode", "cuGraphAddExternalSemaphoresSignalNode",
    "cuGraphAddExternalSemaphoresWaitNode", "cuGraphAddHostNode", "cuGraphAddKernelNode", "cuGraphAddMemAllocNode",
    "cuGraphAddMemFreeNode", "cuGraphAddMemcpyNode", "cuGraphAddMemsetNode", "cuGraphAddNode",
    "cuGraphBatchMemOpNodeGetParams", "cuGraphBatchMemOpNodeSetParams", "cuGraphChildGraphNodeGetGraph",
    "cuGraphClone", "cuGraphConditionalHandleCreate", "cuGraphCreate", "cuGraphDebugDotPrint", "cuGraphDestroy",
    "cuGraphDestroyNode", "cuGraphEventRecordNodeGetEvent", "cuGraphEventRecordNodeSetEvent",
    "cuGraphEventWaitNodeGetEvent", "cuGraphEventWaitNodeSetEvent", "cuGraphExecBatchMemOpNodeSetParams",
    "cuGraphExecChildGraphNodeSetParams", "cuGraphExecDestroy", "cuGraphExecEventRecordNodeSetEvent",
    "cuGraphExecEventWaitNodeSetEvent", "cuGraphExecExternalSemaphoresSignalNodeSetParams",
    "cuGraphExecExternalSemaphoresWaitNodeSetParams", "cuGraphExecGetFlags", "cuGraphExecGetId",
    "cuGraphExecHostNodeSetParams", "cuGraphExecKernelNodeSetParams", "cuGraphExecMemcpyNodeSetParams",
    "cuGraphExecMemsetNodeSetParams", "cuGraphExecNodeSetParams", "cuGraphExecUpdate",
    "cuGraphExternalSemaphoresSignalNodeGetParams", "cuGraphExternalSemaphoresSignalNodeSetParams",
    "cuGraphExternalSemaphoresWaitNodeGetParams", "cuGraphExternalSemaphoresWaitNodeSetParams", "cuGraphGetEdges",
    "cuGraphGetId", "cuGraphGetNodes", "cuGraphGetRootNodes", "cuGraphHostNodeGetParams",
    "cuGraphHostNodeSetParams", "cuGraphKernelNodeCopyAttributes", "cuGraphKernelNodeGetAttribute",
    "cuGraphKernelNodeGetParams", "cuGraphKernelNodeSetAttribute", "cuGraphKernelNodeSetParams",
    "cuGraphMemAllocNodeGetParams", "cuGraphMemFreeNodeGetParams", "cuGraphMemcpyNodeGetParams",
    "cuGraphMemcpyNodeSetParams", "cuGraphMemsetNodeGetParams", "cuGraphMemsetNodeSetParams",
    "cuGraphNodeFindInClone", "cuGraphNodeGetContainingGraph", "cuGraphNodeGetDependencies",
    "cuGraphNodeGetDependentNodes", "cuGraphNodeGetEnabled", "cuGraphNodeGetLocalId", "cuGraphNodeGetParams",
    "cuGraphNodeGetToolsId", "cuGraphNodeGetType", "cuGraphNodeSetEnabled", "cuGraphNodeSetParams",
    "cuGraphReleaseUserObject", "cuGraphRemoveDependencies", "cuGraphRetainUserObject",
    "cuGraphicsEGLRegisterImage", "cuGraphicsGLRegisterBuffer", "cuGraphicsGLRegisterImage",
    "cuGraphicsResourceGetMappedEglFrame", "cuGraphicsResourceGetMappedMipmappedArray",
    "cuGraphicsResourceGetMappedPointer", "cuGraphicsResourceSetMapFlags", "cuGraphicsSubResourceGetMappedArray",
    "cuGraphicsUnregisterResource", "cuGraphicsVDPAURegisterOutputSurface", "cuGraphicsVDPAURegisterVideoSurface",
    "cuGreenCtxCreate", "cuGreenCtxDestroy", "cuGreenCtxGetDevResource", "cuGreenCtxGetId", "cuGreenCtxRecordEvent",
    "cuGreenCtxStreamCreate", "cuImportExternalMemory", "cuImportExternalSemaphore",
    "cuInit", "cuIpcCloseMemHandle", "cuIpcGetEventHandle", "cuIpcGetMemHandle", "cuIpcOpenEventHandle",
    "cuIpcOpenMemHandle", "cuKernelGetAttribute", "cuKernelGetFunction", "cuKernelGetLibrary", "cuKernelGetName",
    "cuKernelGetParamCount", "cuKernelGetParamInfo", "cuKernelSetAttribute", "cuKernelSetCacheConfig",
    "cuLibraryEnumerateKernels", "cuLibraryGetGlobal", "cuLibraryGetKernel", "cuLibraryGetKernelCount",
    "cuLibraryGetManaged", "cuLibraryGetModule", "cuLibraryGetUnifiedFunction", "cuLinkAddData", "cuLinkAddFile",
    "cuLinkCreate", "cuLinkDestroy", "cuLogicalEndpointAddDevice", "cuLogicalEndpointBindAddr",
    "cuLogicalEndpointBindMem", "cuLogicalEndpointCreate", "cuLogicalEndpointDestroy", "cuLogicalEndpointExport",
    "cuLogicalEndpointGetLimits", "cuLogicalEndpointIdRelease", "cuLogicalEndpointIdReserve",
    "cuLogicalEndpointImport", "cuLogicalEndpointQuery", "cuLogicalEndpointUnbind", "cuLogsCurrent",
    "cuLogsDumpToFile", "cuLogsDumpToMemory", "cuLogsRegisterCallback", "cuLogsUnregisterCallback",
    "cuMemAddressFree", "cuMemAddressReserve", "cuMemAdvise", "cuMemAlloc", "cuMemAllocHost", "cuMemAllocManaged",
    "cuMemAllocPitch", "cuMemCreate", "cuMemExportToShareableHandle", "cuMemFree", "cuMemFreeHost",
    "cuMemGetAccess", "cuMemGetAddressRange", "cuMemGetAllocationGranularity",
    "cuMemGetAllocationPropertiesFromHandle", "cuMemGetAttribute", "cuMemGetDefaultMemPool",
    "cuMemGetHandleForAddressRange", "cuMemGetInfo", "cuMemGetLocationInfo", "cuMemGetMemPool", "cuMemHostAlloc",
    "cuMemHostGetDevicePointer", "cuMemHostGetFlags", "cuMemHostRegister", "cuMemHostUnregister",
    "cuMemImportFromShareableHandle", "cuMemMap", "cuMemPoolExportPointer", "cuMemPoolExportToShareableHandle",
    "cuMemPoolGetAccess", "cuMemPoolGetAttribute", "cuMemPoolImportFromShareableHandle", "cuMemPoolImportPointer",
    "cuMemPoolSetAccess", "cuMemPoolSetAttribute", "cuMemPoolTrimTo", "cuMemRangeGetAttribute",
    "cuMemRangeGetAttributes", "cuMemRelease", "cuMemRetainAllocationHandle", "cuMemSetAccess", "cuMemSetMemPool",
    "cuMemUnmap", "cuMipmappedArrayDestroy", "cuMipmappedArrayGetLevel", "cuMipmappedArrayGetMemoryRequirements",
    "cuMipmappedArrayGetSparseProperties", "cuModuleEnumerateFunctions", "cuModuleGetFunction",
    "cuModuleGetFunctionCount", "cuModuleGetGlobal", "cuModuleGetLoadingMode", "cuModuleGetSurfRef",
    "cuModuleGetTexRef", "cuMulticastAddDevice", "cuMulticastBindAddr", "cuMulticastBindMem", "cuMulticastCreate",
    "cuMulticastGetGranularity", "cuMulticastUnbind", "cuOccupancyAvailableDynamicSMemPerBlock",
    "cuOccupancyMaxActiveBlocksPerMultiprocessor", "cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags",
    "cuOccupancyMaxActiveClusters", "cuOccupancyMaxPotentialBlockSize", "cuOccupancyMaxPotentialBlockSizeWithFlags",
    "cuOccupancyMaxPotentialClusterSize", "cuParamSetSize", "cuParamSetTexRef", "cuParamSetf", "cuParamSeti",
    "cuParamSetv", "cuPointerGetAttribute", "cuPointerGetAttributes", "cuPointerSetAttribute",
    "cuProfilerInitialize", "cuProfilerStart", "cuProfilerStop", "cuStreamBeginCapture",
    "cuStreamBeginCaptureToCig", "cuStreamBeginCaptureToGraph", "cuStreamBeginRecaptureToGraph",
    "cuStreamCopyAttributes", "cuStreamCreate", "cuStreamCreateWithPriority", "cuStreamDestroy",
    "cuStreamEndCapture", "cuStreamEndCaptureToCig", "cuStreamGetAttribute", "cuStreamGetCaptureInfo",
    "cuStreamGetCtx", "cuStreamGetDevResource", "cuStreamGetDevice", "cuStreamGetFlags", "cuStreamGetGreenCtx",
    "cuStreamGetId", "cuStreamGetPriority", "cuStreamIsCapturing", "cuStreamQuery", "cuStreamSetAttribute",
    "cuStreamSynchronize", "cuStreamUpdateCaptureDependencies", "cuSurfObjectCreate",
    "cuSurfObjectDestroy", "cuSurfObjectGetResourceDesc", "cuSurfRefGetArray", "cuSurfRefSetArray",
    "cuTensorMapEncodeIm2col", "cuTensorMapEncodeIm2colWide", "cuTensorMapEncodeTiled", "cuTensorMapReplaceAddress",
    "cuTexObjectCreate", "cuTexObjectDestroy", "cuTexObjectGetResourceDesc", "cuTexObjectGetResourceViewDesc",
    "cuTexObjectGetTextureDesc", "cuTexRefCreate", "cuTexRefDestroy", "cuTexRefGetAddress",
    "cuTexRefGetAddressMode", "cuTexRefGetArray", "cuTexRefGetBorderColor", "cuTexRefGetFilterMode",
    "cuTexRefGetFlags", "cuTexRefGetFormat", "cuTexRefGetMaxAnisotropy", "cuTexRefGetMipmapFilterMode",
    "cuTexRefGetMipmapLevelBias", "cuTexRefGetMipmapLevelClamp", "cuTexRefGetMipmappedArray", "cuTexRefSetAddress",
    "cuTexRefSetAddress2D", "cuTexRefSetAddressMode", "cuTexRefSetArray", "cuTexRefSetBorderColor",
    "cuTexRefSetFilterMode", "cuTexRefSetFlags", "cuTexRefSetFormat", "cuTexRefSetMaxAnisotropy",
    "cuTexRefSetMipmapFilterMode", "cuTexRefSetMipmapLevelBias", "cuTexRefSetMipmapLevelClamp",
    "cuTexRefSetMipmappedArray", "cuThreadExchangeStreamCaptureMode", "cuUserObjectCreate", "cuUserObjectRelease",
    "cuUserObjectRetain", "cuVDPAUCtxCreate", "cuVDPAUGetDevice",
];

/// Whether a function of this name was looked at and is harmless.
pub fn is_harmless(name: &[u8]) -> bool {
    let name = without_ending(name);
    HARMLESS.binary_search_by(|known| known.as_bytes().cmp(name)).is_ok()
}

/// `cuStreamQuery` for `cuStreamQuery_ptsz`, `cuCtxCreate` for `cuCtxCreate_v4`.
fn without_ending(name: &[u8]) -> &[u8] {
    let name = name.strip_suffix(b"_ptsz").or_else(|| name.strip_suffix(b"_ptds")).unwrap_or(name);
    match name.iter().rposition(|letter| *letter == b'_') {
        Some(at) if is_version(&name[at + 1..]) => &name[..at],
        _ => name,
    }
}

fn is_version(ending: &[u8]) -> bool {
    ending.strip_prefix(b"v").is_some_and(|number| !number.is_empty() && number.iter().all(u8::is_ascii_digit))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_in_order_and_have_no_ending() {
        assert!(HARMLESS.is_sorted_by(|one, next| one < next), "{HARMLESS:?}");
        assert!(HARMLESS.iter().all(|name| without_ending(name.as_bytes()) == name.as_bytes()));
    }

    #[test]
    fn an_ending_says_nothing_of_what_a_function_does() {
        for name in ["cuStreamQuery", "cuStreamQuery_ptsz", "cuCtxCreate_v4", "cuMemFree_v2", "cuMemGetInfo_v2_ptds"] {
            assert!(is_harmless(name.as_bytes()), "{name}");
        }
        for name in
            ["cuLaunchKernel", "cuMemcpyHtoD", "cuMemsetD8_v2", "cuNew", "cuStreamQuery_", "cuStreamQuery_v", ""]
        {
            assert!(!is_harmless(name.as_bytes()), "{name}");
        }
    }
}
