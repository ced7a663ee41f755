// The CUDA runtime of a machine without a GPU: addresses with nothing behind them, kernels that do
// nothing, events that are done at once. Memory is counted in pages of 2 MiB against a limit, so
// that torch's own caching allocator runs, and runs out, as on a device.
#define _GNU_SOURCE
#include <cuda.h>
#include <driver_types.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define PAGE ((size_t)2 << 20)
#define OUT_OF_MEMORY 2
#define BUCKETS 4096

typedef struct Piece { void *ptr; size_t size; struct Piece *next; } Piece;
typedef struct { size_t size; } Physical;

static size_t limit = 0, used = 0, peak = 0;
static long num_mallocs = 0, num_frees = 0;
static __thread int last_error = 0; /* CUDA keeps one for each thread of the host */
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static Piece *pieces[BUCKETS];

static size_t limit_now(void) {
  if (!limit) {
    char *text = getenv("STUB_GPU_BYTES");
    limit = text ? strtoull(text, 0, 10) : (size_t)80 << 30;
  }
  return limit;
}
void stub_set_limit(size_t bytes) { limit = bytes; }
size_t stub_used(void) { return used; }
size_t stub_peak(void) { return peak; }
void stub_reset_peak(void) { peak = used; }
long stub_mallocs(void) { return num_mallocs; }
long stub_frees(void) { return num_frees; }

// Counts whole pages; 0 when there is no room.
static int count_in(size_t size) {
  if (used + size > limit_now()) return 0;
  used += size;
  if (used > peak) peak = used;
  num_mallocs++;
  return 1;
}
static unsigned bucket_of(void *ptr) { return ((uintptr_t)ptr >> 21) % BUCKETS; }
static void *reserve(size_t size) {
  char *start = mmap(0, size + PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (start == MAP_FAILED) return 0;
  char *aligned = (char *)(((uintptr_t)start + PAGE - 1) / PAGE * PAGE);
  if (aligned > start) munmap(start, aligned - start);
  size_t behind = (start + PAGE) - aligned;
  if (behind) munmap(aligned + size, behind);
  return aligned;
}
int cudaMalloc(void **out, size_t size) {
  size = (size + PAGE - 1) / PAGE * PAGE;
  pthread_mutex_lock(&mutex);
  int fits = count_in(size);
  void *ptr = fits ? reserve(size) : 0;
  if (ptr) {
    Piece *piece = malloc(sizeof *piece);
    *piece = (Piece){ptr, size, pieces[bucket_of(ptr)]};
    pieces[bucket_of(ptr)] = piece;
    *out = ptr;
  } else if (fits) {
    used -= size;
  }
  if (!ptr) last_error = OUT_OF_MEMORY;
  pthread_mutex_unlock(&mutex);
  return ptr ? 0 : OUT_OF_MEMORY;
}
int cudaFree(void *ptr) {
  if (!ptr) return 0;
  pthread_mutex_lock(&mutex);
  Piece **at = &pieces[bucket_of(ptr)];
  while (*at && (*at)->ptr != ptr) at = &(*at)->next;
  Piece *piece = *at;
  if (piece) {
    *at = piece->next;
    munmap(piece->ptr, piece->size);
    used -= piece->size;
    num_frees++;
    free(piece);
  }
  pthread_mutex_unlock(&mutex);
  return piece ? 0 : 1;
}
int cudaMallocHost(void **ptr, size_t size) { *ptr = malloc(size); return 0; }
int cudaHostAlloc(void **ptr, size_t size, unsigned flags) { *ptr = malloc(size); return 0; }
int cudaFreeHost(void *ptr) { free(ptr); return 0; }
int cudaMemGetInfo(size_t *free_bytes, size_t *total) {
  *total = limit_now();
  *free_bytes = *total - used;
  return 0;
}

int cudaGetDevice(int *device) { *device = 0; return 0; }
int cudaSetDevice(int device) { return 0; }
int cudaGetDeviceCount(int *count) { *count = 1; return 0; }
int cudaDriverGetVersion(int *version) { *version = 13020; return 0; }
int cudaRuntimeGetVersion(int *version) { *version = 13020; return 0; }
int cudaGetDeviceProperties(struct cudaDeviceProp *p, int device) {
  memset(p, 0, sizeof *p);
  strcpy(p->name, "STUB");
  p->totalGlobalMem = limit_now();
  p->major = 9;
  p->multiProcessorCount = 132;
  p->warpSize = 32;
  p->maxThreadsPerBlock = 1024;
  p->maxThreadsPerMultiProcessor = 2048;
  p->sharedMemPerBlock = 49152;
  p->sharedMemPerBlockOptin = 232448;
  p->regsPerMultiprocessor = 65536;
  p->l2CacheSize = 60 << 20;
  p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024;
  p->maxThreadsDim[2] = 64;
  p->maxGridSize[0] = 2147483647;
  p->maxGridSize[1] = p->maxGridSize[2] = 65535;
  return 0;
}
int cudaDeviceGetAttribute(int *value, int attribute, int device) {
  *value = attribute == 75 ? 9 : attribute == 76 ? 0 : attribute == 16 ? 132 : attribute == 10 ? 32 : 1024;
  return 0;
}
int cudaDeviceGetPCIBusId(char *text, int length, int device) {
  snprintf(text, length, "0000:00:00.0");
  return 0;
}
int cudaDeviceCanAccessPeer(int *can, int a, int b) { *can = 0; return 0; }
int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = 0; *greatest = -5; return 0; }
int cudaDeviceSynchronize() { return 0; }
int cudaGetLastError() { int error = last_error; last_error = 0; return error; }
int cudaPeekAtLastError() { return last_error; }
const char *cudaGetErrorString(int e) { return e == OUT_OF_MEMORY ? "out of memory" : e ? "stub error" : "no error"; }
const char *cudaGetErrorName(int e) { return e == OUT_OF_MEMORY ? "cudaErrorMemoryAllocation" : "cudaStub"; }

static uintptr_t next_handle = 1000;
static void *handle(void) { return (void *)(__sync_add_and_fetch(&next_handle, 1) * 16); }
int cudaEventCreateWithFlags(void **event, unsigned flags) { *event = handle(); return 0; }
int cudaEventCreate(void **event) { *event = handle(); return 0; }
int cudaEventDestroy(void *event) { return 0; }
int cudaEventQuery(void *event) { return 0; }
int cudaEventRecord(void *event, void *stream) { return 0; }
int cudaEventRecordWithFlags(void *event, void *stream, unsigned flags) { return 0; }
int cudaEventSynchronize(void *event) { return 0; }
int cudaEventElapsedTime(float *ms, void *from, void *to) { *ms = 1; return 0; }
int cudaStreamCreateWithPriority(void **stream, unsigned flags, int priority) { *stream = handle(); return 0; }
int cudaStreamCreateWithFlags(void **stream, unsigned flags) { *stream = handle(); return 0; }
int cudaStreamCreate(void **stream) { *stream = handle(); return 0; }
int cudaStreamDestroy(void *stream) { return 0; }
int cudaStreamQuery(void *stream) { return 0; }
int cudaStreamSynchronize(void *stream) { return 0; }
int cudaStreamWaitEvent(void *stream, void *event, unsigned flags) { return 0; }
int cudaStreamGetPriority(void *stream, int *priority) { *priority = 0; return 0; }
int cudaStreamIsCapturing(void *stream, int *capturing) { *capturing = 0; return 0; }
int cudaStreamGetCaptureInfo(void *stream, int *capturing, ...) { *capturing = 0; return 0; }
int cudaThreadExchangeStreamCaptureMode(int *mode) { return 0; }

int cudaLaunchKernel(const void *function, ...) { return 0; }
int cudaLaunchKernelExC(const void *config, ...) { return 0; }
int cudaMemset(void *ptr, int value, size_t size) { return 0; }
int cudaMemsetAsync(void *ptr, int value, size_t size, void *stream) { return 0; }
int cudaMemcpy(void *to, const void *from, size_t size, int kind) { return 0; }
int cudaMemcpyAsync(void *to, const void *from, size_t size, int kind, void *stream) {
  if (kind == 2) memset(to, 0, size);  // device to host: zeros, not what malloc left
  return 0;
}
int cudaFuncGetAttributes(void *out, const void *function) {
  memset(out, 0, sizeof(struct cudaFuncAttributes));
  ((struct cudaFuncAttributes *)out)->maxThreadsPerBlock = 1024;
  return 0;
}
int cudaFuncSetAttribute(const void *function, int attribute, int value) { return 0; }
int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *count, const void *f, int b, size_t s) { *count = 2; return 0; }
int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *count, const void *f, int b, size_t s, unsigned flags) {
  *count = 2;
  return 0;
}
int cudaPointerGetAttributes(struct cudaPointerAttributes *out, const void *ptr) {
  memset(out, 0, sizeof *out);
  out->type = cudaMemoryTypeDevice;
  out->devicePointer = (void *)ptr;
  return 0;
}
void **__cudaRegisterFatBinary(void *binary) { static void *handles[64]; return handles; }
void __cudaRegisterFatBinaryEnd(void **handles) {}
void __cudaUnregisterFatBinary(void **handles) {}
void __cudaRegisterFunction() {}
void __cudaRegisterVar() {}
unsigned __cudaPushCallConfiguration() { return 0; }
int __cudaPopCallConfiguration() { return 0; }

// The driver's virtual memory, which expandable segments ask for through the runtime.
static CUresult nothing() { return 0; }
static CUresult current_context(void **context) { *context = (void *)16; return 0; }
static CUresult address_reserve(CUdeviceptr *out, size_t size, size_t alignment, CUdeviceptr hint, unsigned long long flags) {
  void *ptr = reserve(size);
  *out = (CUdeviceptr)ptr;
  return ptr ? 0 : OUT_OF_MEMORY;
}
static CUresult create(CUmemGenericAllocationHandle *out, size_t size, const void *properties, unsigned long long flags) {
  pthread_mutex_lock(&mutex);
  int fits = count_in(size);
  pthread_mutex_unlock(&mutex);
  if (!fits) return OUT_OF_MEMORY;
  Physical *made = malloc(sizeof *made);
  made->size = size;
  *out = (uintptr_t)made;
  return 0;
}
static CUresult release(CUmemGenericAllocationHandle handle) {
  Physical *physical = (Physical *)(uintptr_t)handle;
  pthread_mutex_lock(&mutex);
  used -= physical->size;
  num_frees++;
  pthread_mutex_unlock(&mutex);
  free(physical);
  return 0;
}
static CUresult context_state(CUdevice device, unsigned *flags, int *active) {
  if (flags) *flags = 0;
  if (active) *active = 1;
  return 0;
}
static CUresult granularity(size_t *out, const void *properties, int option) { *out = PAGE; return 0; }
static CUresult attribute(int *value, int name, int device) { *value = 1; return 0; }
static CUresult error_string(CUresult error, const char **text) { *text = "stub"; return 0; }
static const struct { const char *name; void *function; } entries[] = {
    {"cuMemAddressReserve", address_reserve}, {"cuMemCreate", create}, {"cuMemRelease", release},
    {"cuDevicePrimaryCtxGetState", context_state}, {"cuMemGetAllocationGranularity", granularity},
    {"cuDeviceGetAttribute", attribute}, {"cuGetErrorString", error_string}, {"cuCtxGetCurrent", current_context},
};
int cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version, unsigned long long flags, int *status) {
  if (status) *status = 0;
  *function = nothing;
  for (size_t i = 0; i < sizeof entries / sizeof *entries; i++)
    if (!strcmp(name, entries[i].name)) *function = entries[i].function;
  return 0;
}
