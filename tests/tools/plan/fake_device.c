/* A CUDA runtime with one device that computes nothing, for fake tensors on machines without a GPU.
 *
 * Preloaded, it answers what torch asks of the runtime while it runs an autograd graph of fake
 * tensors: streams and events are numbers, and the device is an H100, so that kernels are chosen as
 * on one. Whatever would need memory or a kernel of the device is not here and fails.
 */
#include <stddef.h>
#include <string.h>

#include "driver_types.h"

#define OK(name, ...) int name(__VA_ARGS__) { return 0; }
#define HANDLE(name, ...) int name(void **out, ##__VA_ARGS__) { *out = (void *)16; return 0; }

signed char _ZN3c104cuda12device_countEv(void) { return 1; }
signed char _ZN3c104cuda28device_count_ensure_non_zeroEv(void) { return 1; }
int cudaGetDeviceCount(int *count) { *count = 1; return 0; }
int cudaGetDevice(int *device) { *device = 0; return 0; }
OK(cudaSetDevice, int device)
OK(cudaGetLastError, void)
OK(cudaPeekAtLastError, void)
OK(cudaDeviceSynchronize, void)
int cudaDriverGetVersion(int *version) { *version = 13000; return 0; }
int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = 0; *greatest = -5; return 0; }
HANDLE(cudaStreamCreate)
HANDLE(cudaStreamCreateWithFlags, unsigned flags)
HANDLE(cudaStreamCreateWithPriority, unsigned flags, int priority)
OK(cudaStreamQuery, void *stream)
OK(cudaStreamSynchronize, void *stream)
OK(cudaStreamWaitEvent, void *stream, void *event, unsigned flags)
int cudaStreamIsCapturing(void *stream, int *status) { *status = 0; return 0; }
int cudaStreamGetCaptureInfo(void *stream, int *status) { *status = 0; return 0; }
int cudaStreamGetPriority(void *stream, int *priority) { *priority = 0; return 0; }
OK(cudaThreadExchangeStreamCaptureMode, int *mode)
HANDLE(cudaEventCreate)
HANDLE(cudaEventCreateWithFlags, unsigned flags)
OK(cudaEventDestroy, void *event)
OK(cudaEventRecord, void *event, void *stream)
OK(cudaEventRecordWithFlags, void *event, void *stream, unsigned flags)
OK(cudaEventQuery, void *event)
OK(cudaEventSynchronize, void *event)

int cudaGetDeviceProperties(struct cudaDeviceProp *found, int device) {
  memset(found, 0, sizeof *found);
  strcpy(found->name, "NVIDIA H100 80GB HBM3");
  found->major = 9;
  found->warpSize = 32;
  found->multiProcessorCount = 132;
  found->totalGlobalMem = 80ull << 30;
  found->maxThreadsPerBlock = 1024;
  found->maxThreadsPerMultiProcessor = 2048;
  found->sharedMemPerBlock = 48 << 10;
  found->sharedMemPerBlockOptin = 227 << 10;
  found->regsPerBlock = 65536;
  return 0;
}

/* Of the driver: no context is active. */
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *is_active) {
  *flags = 0;
  *is_active = 0;
  return 0;
}
