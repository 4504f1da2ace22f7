/* Shared by the stand-in libraries of the null GPU. All of it lives in libcuda.so.1 (driver.c, memory.c, cubin.c,
 * card.c); the other libraries link against that one, so there is one card, one memory and one current device per
 * process. */
#pragma once
#include <stddef.h>
#include <stdint.h>

/* CUresult and cudaError_t use the same numbers for all of these. */
enum {
  NG_OK = 0,
  NG_INVALID_VALUE = 1,
  NG_OUT_OF_MEMORY = 2,
  NG_NOT_INITIALIZED = 3,
  NG_NO_DEVICE = 100,
  NG_INVALID_DEVICE = 101,
  NG_INVALID_IMAGE = 200,
  NG_INVALID_CONTEXT = 201,
  NG_NO_BINARY_FOR_GPU = 209,
  NG_FILE_NOT_FOUND = 301,
  NG_INVALID_HANDLE = 400,
  NG_NOT_FOUND = 500,
  NG_LAUNCH_OUT_OF_RESOURCES = 701,
  NG_NOT_SUPPORTED = 801,
};

#define NG_MAX_DEVICES 16
#define NG_MAX_ATTRIBUTES 256
#define NG_HOST (-1) /* "device" of pinned host memory */

/* ---- card.c: the one card model that all devices of the process are ---- */
struct ng_card {
  char name[256];
  uint64_t memory; /* bytes */
  int driver;      /* CUDA version the NVIDIA driver claims, e.g. 13000 */
  int count;       /* number of devices */
};
const struct ng_card *ng_card(void);
int ng_attribute(int id); /* 0 for one the profile lacks */
int ng_has_attribute(int id);
int ng_architecture(void); /* 120 for compute capability 12.0 */
long ng_setting(const char *variable, long otherwise);

/* ---- card.c: log and errors ---- */
void ng_log(int level, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* Called by every generated stub: remembers and logs the symbol, gives `code` back. */
int ng_refuse(const char *symbol, int code);
const char *ng_error_name(int code);
const char *ng_error_text(int code); /* always says "null GPU" */

/* ---- driver.c: devices and streams ---- */
int ng_device(void); /* current device of this thread */
int ng_set_device(int device);
int ng_valid_device(int device);
int ng_peer_access(int device, int peer);
void ng_uuid(void *uuid, int device);

struct ng_capture;
struct ng_stream;
struct ng_event;
int ng_stream_create(void **stream, unsigned flags, int priority);
int ng_stream_destroy(void *stream);
int ng_stream_priority(void *stream, int *priority);
int ng_stream_flags(void *stream, unsigned *flags);
int ng_stream_device(void *stream, int *device);
int ng_event_create(void **event);
int ng_event_destroy(void *event);
int ng_event_record(void *event, void *stream);
int ng_stream_wait(void *stream, void *event);
float ng_elapsed_milliseconds(void);
int ng_capture_begin(void *stream, void *graph); /* graph NULL: a new one */
int ng_capture_end(void *stream, void **graph);
/* Status 0 = none, 1 = active. Every out pointer may be NULL. */
int ng_capture_info(void *stream, int *status, unsigned long long *id, void **graph);

/* ---- memory.c ---- */
struct ng_block {
  uintptr_t start;
  size_t size;
  int device;   /* or NG_HOST */
  int reserved; /* address range only (cuMemAddressReserve): not counted as used */
};
int ng_alloc(void **pointer, size_t size, int device); /* device may be NG_HOST */
int ng_free(void *pointer);                            /* NULL is fine */
int ng_reserve(void **pointer, size_t size, int device);
int ng_register_host(void *pointer, size_t size);
int ng_unregister_host(void *pointer);
int ng_find(const void *pointer, struct ng_block *block); /* 1 when inside a live block */
int ng_charge(int device, size_t size);                   /* physical memory without an address (cuMemCreate) */
void ng_discharge(int device, size_t size);
size_t ng_free_bytes(int device);
void ng_drop(void *pointer, size_t size); /* pages read as zero again */
int ng_copy(void *to, const void *from, size_t size);
int ng_fill(void *to, unsigned value, size_t width, size_t count); /* width 1, 2 or 4 bytes */
void *ng_handle(void);                                             /* a distinct opaque non-NULL value */

/* ---- cubin.c ---- */
struct ng_image; /* a loaded module */
struct ng_kernel {
  struct ng_kernel *next;
  char name[512];
  int inspected;              /* 0: PTX, nothing is known of its resources */
  int registers;              /* per thread */
  int local_bytes;            /* per thread: stack frame and spills */
  int static_shared;          /* bytes per block */
  int constant_bytes;         /* user constants of the module */
  int max_threads;            /* per block, as the NVIDIA driver computes it */
  int declared_threads;       /* .maxntid, 0 without */
  unsigned required_block[3]; /* .reqntid, 0 without */
  int dynamic_shared;         /* limit set through FuncSetAttribute, bytes */
  int cluster_allowed;
  int carveout;
};
int ng_image_load(struct ng_image **image, const void *data);
int ng_image_load_file(struct ng_image **image, const char *path);
void ng_image_unload(struct ng_image *image);
int ng_image_kernel(struct ng_image *image, const char *name, struct ng_kernel **kernel);
int ng_blocks_per_sm(const struct ng_kernel *kernel, int threads, size_t dynamic_shared);
int ng_check_launch(const struct ng_kernel *kernel, const unsigned grid[3], const unsigned block[3],
                    unsigned dynamic_shared);
int ng_max_dynamic_shared(const struct ng_kernel *kernel);
