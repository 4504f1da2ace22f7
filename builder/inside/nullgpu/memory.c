/* Memory of the null devices: address ranges of this process whose pages exist only once touched.
 * One table holds every live block (device memory, reserved ranges, pinned host memory), sorted by address. */
#define _GNU_SOURCE
#include "nullgpu.h"
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define WINDOW (4ULL << 40) /* address space of one device: fourteen times the largest card, for reservations */
#define GRAIN (2ULL << 20)  /* CUDA's own granularity of address ranges */
#define PAGE 4096ULL

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct ng_block *blocks;
static int block_count, block_room;
static char *windows;
static uint64_t used[NG_MAX_DEVICES];
static int truth_loaded;

/* Called by blackwell.integer_truth once its operators are installed: without them shapes that depend on device values
 * would be wrong. */
void nullgpu_truth_loaded(void)
{
  truth_loaded = 1;
}

static size_t round_up(size_t size, size_t unit)
{
  return (size + unit - 1) / unit * unit;
}

/* Index of the first block that starts above `address`. */
static int upper(uintptr_t address)
{
  int low = 0, high = block_count;
  while (low < high) {
    int middle = (low + high) / 2;
    if (blocks[middle].start > address)
      high = middle;
    else
      low = middle + 1;
  }
  return low;
}

static int insert(uintptr_t start, size_t size, int device, int reserved)
{
  if (block_count == block_room) {
    int room = block_room ? block_room * 2 : 256;
    struct ng_block *grown = realloc(blocks, (size_t)room * sizeof *grown);
    if (!grown)
      return NG_OUT_OF_MEMORY;
    blocks = grown;
    block_room = room;
  }
  int at = upper(start);
  memmove(blocks + at + 1, blocks + at, (size_t)(block_count - at) * sizeof *blocks);
  blocks[at] = (struct ng_block){start, size, device, reserved};
  block_count++;
  return NG_OK;
}

static int find(uintptr_t address)
{
  int at = upper(address) - 1;
  return at >= 0 && address - blocks[at].start < blocks[at].size ? at : -1;
}

static int open_windows(void)
{
  if (windows)
    return NG_OK;
  char *base = mmap(NULL, WINDOW * (size_t)ng_card()->count + GRAIN, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) {
    ng_log(0, "can't reserve address space (ulimit -v, or vm.overcommit_memory=2)");
    return NG_OUT_OF_MEMORY;
  }
  size_t whole = WINDOW * (size_t)ng_card()->count + GRAIN;
  madvise(base, whole, MADV_NOHUGEPAGE); /* a huge page would commit 2 MiB for one touched byte */
  madvise(base, whole, MADV_DONTDUMP);
  windows = (char *)round_up((uintptr_t)base, GRAIN);
  return NG_OK;
}

/* First gap of the device's window that is large enough. */
static uintptr_t gap(size_t size, int device)
{
  uintptr_t start = (uintptr_t)windows + (uintptr_t)device * WINDOW;
  uintptr_t end = start + WINDOW;
  uintptr_t candidate = start;
  for (int i = upper(start - 1); i < block_count && blocks[i].start < end; i++) {
    if (blocks[i].start - candidate >= size)
      break;
    candidate = round_up(blocks[i].start + blocks[i].size, GRAIN);
  }
  return candidate + size <= end ? candidate : 0;
}

static int place(void **pointer, size_t size, int device, int reserved)
{
  int error = open_windows();
  if (error)
    return error;
  uintptr_t start = gap(size, device);
  if (!start)
    return NG_OUT_OF_MEMORY;
  error = insert(start, size, device, reserved);
  if (!error)
    *pointer = (void *)start;
  return error;
}

static int place_host(void **pointer, size_t size)
{
  if (posix_memalign(pointer, PAGE, size))
    return NG_OUT_OF_MEMORY;
  int error = insert((uintptr_t)*pointer, size, NG_HOST, 0);
  if (error)
    free(*pointer);
  return error;
}

int ng_alloc(void **pointer, size_t size, int device)
{
  if (!truth_loaded && !ng_setting("NULLGPU_WITHOUT_TRUTH", 0)) {
    ng_log(0, "device memory asked for, but blackwell.integer_truth is not loaded: a Python started with -I, -S or -E, "
              "or no Python");
    return NG_NOT_INITIALIZED;
  }
  size = round_up(size ? size : 1, PAGE);
  pthread_mutex_lock(&lock);
  int error = NG_OUT_OF_MEMORY;
  if (device == NG_HOST) {
    error = place_host(pointer, size);
  } else if (used[device] + size <= ng_card()->memory) {
    error = place(pointer, size, device, 0);
    if (!error)
      used[device] += size;
  }
  pthread_mutex_unlock(&lock);
  return error;
}

int ng_reserve(void **pointer, size_t size, int device)
{
  pthread_mutex_lock(&lock);
  int error = place(pointer, round_up(size, GRAIN), device, 1);
  pthread_mutex_unlock(&lock);
  return error;
}

int ng_free(void *pointer)
{
  if (!pointer)
    return NG_OK;
  pthread_mutex_lock(&lock);
  int at = find((uintptr_t)pointer);
  int error = at < 0 || blocks[at].start != (uintptr_t)pointer ? NG_INVALID_VALUE : NG_OK;
  if (!error) {
    struct ng_block gone = blocks[at];
    memmove(blocks + at, blocks + at + 1, (size_t)(--block_count - at) * sizeof *blocks);
    if (gone.device == NG_HOST) {
      free(pointer);
    } else {
      madvise(pointer, gone.size, MADV_DONTNEED);
      if (!gone.reserved)
        used[gone.device] -= gone.size;
    }
  }
  pthread_mutex_unlock(&lock);
  return error;
}

int ng_register_host(void *pointer, size_t size)
{
  pthread_mutex_lock(&lock);
  int error = find((uintptr_t)pointer) >= 0 ? NG_INVALID_VALUE : insert((uintptr_t)pointer, size, NG_HOST, 0);
  pthread_mutex_unlock(&lock);
  return error;
}

int ng_unregister_host(void *pointer)
{
  pthread_mutex_lock(&lock);
  int at = find((uintptr_t)pointer);
  int error =
      at < 0 || blocks[at].start != (uintptr_t)pointer || blocks[at].device != NG_HOST ? NG_INVALID_VALUE : NG_OK;
  if (!error)
    memmove(blocks + at, blocks + at + 1, (size_t)(--block_count - at) * sizeof *blocks);
  pthread_mutex_unlock(&lock);
  return error;
}

int ng_find(const void *pointer, struct ng_block *block)
{
  pthread_mutex_lock(&lock);
  int at = find((uintptr_t)pointer);
  if (at >= 0 && block)
    *block = blocks[at];
  pthread_mutex_unlock(&lock);
  return at >= 0;
}

int ng_charge(int device, size_t size)
{
  pthread_mutex_lock(&lock);
  int error = used[device] + size <= ng_card()->memory ? NG_OK : NG_OUT_OF_MEMORY;
  if (!error)
    used[device] += size;
  pthread_mutex_unlock(&lock);
  return error;
}

void ng_discharge(int device, size_t size)
{
  pthread_mutex_lock(&lock);
  used[device] -= size;
  pthread_mutex_unlock(&lock);
}

size_t ng_free_bytes(int device)
{
  return ng_card()->memory - used[device];
}

void ng_drop(void *pointer, size_t size)
{
  uintptr_t first = round_up((uintptr_t)pointer, PAGE);
  uintptr_t last = ((uintptr_t)pointer + size) / PAGE * PAGE;
  if (last <= first) {
    memset(pointer, 0, size);
    return;
  }
  memset(pointer, 0, first - (uintptr_t)pointer);
  madvise((void *)first, last - first, MADV_DONTNEED);
  memset((void *)last, 0, (uintptr_t)pointer + size - last);
}

static int on_device(const void *pointer)
{
  struct ng_block block;
  return ng_find(pointer, &block) && block.device != NG_HOST;
}

/* Large contents are dropped (they read as zero), so that a 100 GB model costs no memory: they are weights, whose
 * values nobody may use. Integer tensors don't depend on this limit: blackwell.integer_truth copies them itself. */
static size_t keep_limit(void)
{
  static long limit = -1;
  if (limit < 0)
    limit = ng_setting("NULLGPU_KEEP_BYTES", 4L << 20);
  return (size_t)limit;
}

int ng_copy(void *to, const void *from, size_t size)
{
  if (!size)
    return NG_OK;
  if (!to || !from)
    return NG_INVALID_VALUE;
  if (size > keep_limit() && on_device(to))
    ng_drop(to, size);
  else
    memmove(to, from, size);
  return NG_OK;
}

int ng_fill(void *to, unsigned value, size_t width, size_t count)
{
  size_t size = width * count;
  if (!size)
    return NG_OK;
  if (!to)
    return NG_INVALID_VALUE;
  if (on_device(to) && (value == 0 || size > keep_limit())) {
    ng_drop(to, size);
  } else if (width == 1) {
    memset(to, (int)value, count);
  } else {
    for (size_t i = 0; i < count; i++)
      memcpy((char *)to + i * width, &value, width);
  }
  return NG_OK;
}

void *ng_handle(void)
{
  static uint64_t next = 0x5eed0000;
  return (void *)__sync_add_and_fetch(&next, 16);
}
