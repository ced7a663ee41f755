// libnvidia-ml.so.1 of a machine without a GPU.
#define NOT_SUPPORTED 3
int nvmlInit_v2() { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 1; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) { *device = (void *)16; return 0; }
int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **device) { *device = (void *)16; return 0; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = 13020; return 0; }
int nvmlErrorString() { return 0; }
int nvmlDeviceGetGpuFabricInfoV() { return NOT_SUPPORTED; }
int nvmlDeviceGetNvLinkRemoteDeviceType() { return NOT_SUPPORTED; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2() { return NOT_SUPPORTED; }
int nvmlDeviceGetComputeRunningProcesses() { return NOT_SUPPORTED; }
int nvmlDeviceGetP2PStatus() { return NOT_SUPPORTED; }
