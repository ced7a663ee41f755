// libcuda.so.1 of a machine without a GPU: one device, whose work is always done.
#include <stdint.h>
int cuInit(unsigned flags) { return 0; }
int cuDriverGetVersion(int *version) { *version = 13020; return 0; }
int cuDeviceGetCount(int *count) { *count = 1; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = 0; return 0; }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
  if (flags) *flags = 0;
  if (active) *active = 1;
  return 0;
}
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)16; return 0; }
int cuCtxGetCurrent(void **context) { *context = (void *)16; return 0; }
int cuCtxSetCurrent(void *context) { return 0; }
int cuGetErrorString(int error, const char **text) { *text = "stub"; return 0; }
int cuPointerGetAttribute() { return 0; }
int cuFuncSetAttribute() { return 0; }
int cuFuncGetAttribute(int *value) { *value = 0; return 0; }
int cuLaunchKernel() { return 0; }
int cuGetProcAddress_v2(const char *name, void **found, int version, uint64_t flags, void *status) {
  *found = 0;
  return 500;  // not found
}
