// libcuda.so.1 of a machine without a GPU: one device, whose work is always done.
// Its pages are real memory: what is mapped at two addresses is the same bytes, what is not mapped
// cannot be touched.
#define _GNU_SOURCE
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>
#define PAGE (2ull << 20)
#define INVALID_VALUE 1
#define OUT_OF_MEMORY 2
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

typedef struct { int type, handle_types, location, device; void *metadata; unsigned char flags[8]; } Properties;
typedef struct { int location, device, flags; } Access;
typedef struct { int file; size_t size; } Physical;
int num_waits = 0;
static uint64_t used = 0;
static int on_map(void *ptr, size_t size, int access, int flags, int file) {
  return mmap(ptr, size, access, flags | MAP_FIXED, file, 0) == MAP_FAILED ? INVALID_VALUE : 0;
}
int cuCtxPushCurrent_v2(void *context) { return context == (void *)16 ? 0 : INVALID_VALUE; }
int cuCtxPopCurrent_v2(void **context) { *context = (void *)16; return 0; }
int cuCtxSynchronize() { num_waits++; return 0; }
int cuMemAddressReserve(uint64_t *out, size_t size, size_t alignment, uint64_t hint, uint64_t flags) {
  if (size % PAGE || alignment || hint || flags) return INVALID_VALUE;
  void *found = mmap(0, size + PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (found == MAP_FAILED) return OUT_OF_MEMORY;
  *out = ((uint64_t)found + PAGE - 1) / PAGE * PAGE;  // what is left at both ends stays reserved
  return 0;
}
int cuMemAddressFree(uint64_t ptr, size_t size) { return munmap((void *)ptr, size) ? INVALID_VALUE : 0; }
int cuMemCreate(uint64_t *out, size_t size, const Properties *asked, uint64_t flags) {
  if (size % PAGE || asked->type != 1 || asked->handle_types || asked->location != 1 || asked->device || flags)
    return INVALID_VALUE;
  const char *capacity = getenv("STUB_GPU_BYTES");
  if (used + size > (capacity ? strtoull(capacity, 0, 10) : 0)) return OUT_OF_MEMORY;
  Physical *made = malloc(sizeof *made);
  made->file = memfd_create("page", 0);
  made->size = size;
  if (ftruncate(made->file, size)) return INVALID_VALUE;
  used += size;
  *out = (uint64_t)made;
  return 0;
}
int cuMemRelease(uint64_t handle) {
  Physical *physical = (Physical *)handle;
  used -= physical->size;
  close(physical->file);
  free(physical);
  return 0;
}
int cuMemMap(uint64_t ptr, size_t size, size_t offset, uint64_t handle, uint64_t flags) {
  if (ptr % PAGE || offset || flags) return INVALID_VALUE;
  return on_map((void *)ptr, size, PROT_NONE, MAP_SHARED, ((Physical *)handle)->file);
}
int cuMemSetAccess(uint64_t ptr, size_t size, const Access *asked, size_t count) {
  if (asked->location != 1 || asked->device || asked->flags != 3 || count != 1) return INVALID_VALUE;
  return mprotect((void *)ptr, size, PROT_READ | PROT_WRITE) ? INVALID_VALUE : 0;
}
int cuMemUnmap(uint64_t ptr, size_t size) {
  return on_map((void *)ptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1);
}
