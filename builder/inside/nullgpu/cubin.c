/* Loaded modules. What a kernel needs (registers, stack, shared memory, threads) is read from the cubin's ELF, so that
 * resource checks of Triton and Inductor see what the NVIDIA driver would report. Layout of `.nv.info`: nvidia's
 * cuobjdump -elf prints the same records. */
#define _GNU_SOURCE
#include "nullgpu.h"
#include <elf.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Records of .nv.info and .nv.compat: one byte format, one byte attribute, then a byte, a half word, or a size and that
 * many bytes. */
enum { FORMAT_SIZED = 4 };
enum { INFO_MAX_THREADS = 0x05, INFO_REQUIRED_THREADS = 0x10, INFO_FRAME_SIZE = 0x11, INFO_REGISTERS = 0x2f };
enum { COMPAT_ACCELERATOR = 0x09 };

/* From compute capability 9.0 on a block's first 1024 bytes of shared memory are the system's; the section's size
 * counts them, the NVIDIA driver's answer does not. */
enum { RESERVED_SHARED = 1024 };

/* e_flags: with ABI version 8 bits 8-15 are the architecture and bit 3 says "a"; before, bits 0-7 and bit 11. */
enum { NEW_ABI = 8, NEW_SPECIFIC = 0x8, OLD_SPECIFIC = 0x800 };

enum { WARP = 32, REGISTER_UNIT = 256, WARP_UNIT = 4 };
enum { /* CUdevice_attribute */
       MAX_THREADS_PER_BLOCK = 1,
       MAX_BLOCK_X = 2, /* then y and z */
       MAX_GRID_X = 5,
       SHARED_PER_BLOCK = 8,
       REGISTERS_PER_BLOCK = 12,
       THREADS_PER_SM = 39,
       SHARED_PER_SM = 81,
       REGISTERS_PER_SM = 82,
       SHARED_OPT_IN = 97,
       BLOCKS_PER_SM = 106,
       RESERVED_PER_BLOCK = 111,
};

struct ng_image {
  size_t size;
  char *data;                /* NULL for PTX: nothing can be read from it */
  struct ng_kernel *kernels; /* those asked for; asking again gives the same one, with what was set on it */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static size_t elf_size(const char *data)
{
  const Elf64_Ehdr *header = (const void *)data;
  const Elf64_Shdr *sections = (const void *)(data + header->e_shoff);
  size_t size = header->e_shoff + (size_t)header->e_shnum * header->e_shentsize;
  size_t programs = header->e_phoff + (size_t)header->e_phnum * header->e_phentsize;
  if (programs > size)
    size = programs;
  for (int i = 0; i < header->e_shnum; i++)
    if (sections[i].sh_type != SHT_NOBITS && sections[i].sh_offset + sections[i].sh_size > size)
      size = sections[i].sh_offset + sections[i].sh_size;
  return size;
}

static const Elf64_Shdr *section(const char *data, const char *name)
{
  const Elf64_Ehdr *header = (const void *)data;
  const Elf64_Shdr *sections = (const void *)(data + header->e_shoff);
  const char *names = data + sections[header->e_shstrndx].sh_offset;
  for (int i = 0; i < header->e_shnum; i++)
    if (!strcmp(names + sections[i].sh_name, name))
      return sections + i;
  return NULL;
}

/* The next record: its attribute, where its value lies and how long that is. Returns NULL behind the last one. */
static const uint8_t *record(const uint8_t *at, const uint8_t *end, int *attribute, const uint8_t **value, size_t *size)
{
  if (at + 4 > end)
    return NULL;
  *attribute = at[1];
  if (at[0] != FORMAT_SIZED) {
    *value = at + 2;
    *size = 2;
    return at + 4;
  }
  *size = at[2] | (size_t)at[3] << 8;
  *value = at + 4;
  return *value + *size <= end ? *value + *size : NULL;
}

static int accelerator_specific(const char *data)
{
  const Elf64_Ehdr *header = (const void *)data;
  if (header->e_ident[EI_ABIVERSION] < NEW_ABI)
    return (header->e_flags & OLD_SPECIFIC) != 0;
  if (header->e_flags & NEW_SPECIFIC)
    return 1;
  const Elf64_Shdr *compat = section(data, ".nv.compat"); /* where CUDA 13's assembler says it */
  if (!compat)
    return 0;
  const uint8_t *at = (const void *)(data + compat->sh_offset), *end = at + compat->sh_size, *value;
  int attribute;
  size_t size;
  while ((at = record(at, end, &attribute, &value, &size)))
    if (attribute == COMPAT_ACCELERATOR)
      return value[0] != 0;
  return 0;
}

/* A cubin runs on its own architecture and, unless it is "a" code, on later minor versions of the same major one. */
static int runs_here(const char *data)
{
  const Elf64_Ehdr *header = (const void *)data;
  unsigned flags = header->e_flags;
  int architecture = header->e_ident[EI_ABIVERSION] < NEW_ABI ? (int)(flags & 0xff) : (int)(flags >> 8 & 0xff);
  int card = ng_architecture();
  int fits = accelerator_specific(data) ? architecture == card
                                        : architecture / 10 == card / 10 && architecture % 10 <= card % 10;
  if (!fits)
    ng_log(1, "cubin for sm_%d does not run on sm_%d", architecture, card);
  return fits;
}

static int is_ptx(const char *data)
{
  while (*data == ' ' || *data == '\n' || *data == '\t' || *data == '\r')
    data++;
  return !strncmp(data, "//", 2) || !strncmp(data, ".version", 8);
}

int ng_image_load(struct ng_image **image, const void *data)
{
  const Elf64_Ehdr *header = data;
  int elf = data && !memcmp(data, ELFMAG, SELFMAG);
  if (!elf && !(data && is_ptx(data)))
    return data ? ng_refuse("loading a fat binary", NG_NOT_SUPPORTED) : NG_INVALID_VALUE;
  if (elf && (header->e_machine != 190 /* EM_CUDA */ || !header->e_shoff))
    return NG_INVALID_IMAGE;
  if (elf && !runs_here(data))
    return NG_NO_BINARY_FOR_GPU;
  struct ng_image *loaded = calloc(1, sizeof *loaded);
  if (!loaded)
    return NG_OUT_OF_MEMORY;
  if (elf) {
    loaded->size = elf_size(data);
    loaded->data = malloc(loaded->size);
    if (!loaded->data) {
      free(loaded);
      return NG_OUT_OF_MEMORY;
    }
    memcpy(loaded->data, data, loaded->size);
  }
  *image = loaded;
  return NG_OK;
}

int ng_image_load_file(struct ng_image **image, const char *path)
{
  int file = open(path, O_RDONLY | O_CLOEXEC);
  if (file < 0)
    return NG_FILE_NOT_FOUND;
  off_t size = lseek(file, 0, SEEK_END);
  char *data = calloc(1, (size_t)size + sizeof(Elf64_Ehdr)); /* zero behind it: a short file is no ELF, PTX ends */
  int error = data && pread(file, data, (size_t)size, 0) == size ? ng_image_load(image, data) : NG_INVALID_IMAGE;
  if (!error && (*image)->size > (size_t)size) {
    ng_image_unload(*image);
    error = NG_INVALID_IMAGE;
  }
  free(data);
  close(file);
  return error;
}

void ng_image_unload(struct ng_image *image)
{
  if (!image)
    return;
  for (struct ng_kernel *kernel = image->kernels, *next; kernel; kernel = next) {
    next = kernel->next;
    free(kernel);
  }
  free(image->data);
  free(image);
}

static void read_totals(const char *data, struct ng_kernel *kernel)
{
  const Elf64_Ehdr *header = (const void *)data;
  const Elf64_Shdr *sections = (const void *)(data + header->e_shoff);
  const Elf64_Shdr *info = section(data, ".nv.info");
  if (!info)
    return;
  const Elf64_Shdr *table = sections + info->sh_link;
  const Elf64_Sym *symbols = (const void *)(data + table->sh_offset);
  const char *names = data + sections[table->sh_link].sh_offset;
  const uint8_t *at = (const void *)(data + info->sh_offset), *end = at + info->sh_size, *value;
  int attribute;
  size_t size;
  while ((at = record(at, end, &attribute, &value, &size))) {
    uint32_t pair[2]; /* symbol, value */
    if (size < sizeof pair || (attribute != INFO_REGISTERS && attribute != INFO_FRAME_SIZE))
      continue;
    memcpy(pair, value, sizeof pair);
    if (pair[0] >= table->sh_size / sizeof *symbols || strcmp(names + symbols[pair[0]].st_name, kernel->name))
      continue;
    if (attribute == INFO_REGISTERS)
      kernel->registers = (int)pair[1];
    else
      kernel->local_bytes = (int)pair[1];
  }
}

/* What the source said of the block's shape: a bound (.maxntid), or the only one allowed (.reqntid). */
static void read_declared(const char *data, struct ng_kernel *kernel)
{
  char name[600];
  snprintf(name, sizeof name, ".nv.info.%s", kernel->name);
  const Elf64_Shdr *info = section(data, name);
  if (!info)
    return;
  const uint8_t *at = (const void *)(data + info->sh_offset), *end = at + info->sh_size, *value;
  int attribute;
  size_t size;
  while ((at = record(at, end, &attribute, &value, &size))) {
    uint32_t shape[3];
    if (size < sizeof shape || (attribute != INFO_MAX_THREADS && attribute != INFO_REQUIRED_THREADS))
      continue;
    memcpy(shape, value, sizeof shape);
    if (attribute == INFO_REQUIRED_THREADS)
      memcpy(kernel->required_block, shape, sizeof shape);
    else
      kernel->declared_threads = (int)(shape[0] * shape[1] * shape[2]);
  }
}

static int round_up(int value, int unit)
{
  return (value + unit - 1) / unit * unit;
}

/* Warps whose registers fit: allocated per warp in units of 256, warps in fours (one for each scheduler). */
static int warps_by_registers(const struct ng_kernel *kernel, int available)
{
  int each = round_up((kernel->registers ? kernel->registers : 1) * WARP, REGISTER_UNIT);
  return available / each / WARP_UNIT * WARP_UNIT;
}

static int inspect(const char *data, struct ng_kernel *kernel)
{
  char text[600], shared[600];
  snprintf(text, sizeof text, ".text.%s", kernel->name);
  snprintf(shared, sizeof shared, ".nv.shared.%s", kernel->name);
  if (!section(data, text))
    return NG_NOT_FOUND;
  kernel->inspected = 1;
  read_totals(data, kernel);
  read_declared(data, kernel);
  const Elf64_Shdr *memory = section(data, shared), *constants = section(data, ".nv.constant3");
  if (memory && memory->sh_size)
    kernel->static_shared = (int)memory->sh_size - (ng_architecture() >= 90 ? RESERVED_SHARED : 0);
  if (constants)
    kernel->constant_bytes = (int)constants->sh_size;
  int fitting = warps_by_registers(kernel, ng_attribute(REGISTERS_PER_BLOCK)) * WARP;
  if (fitting < kernel->max_threads)
    kernel->max_threads = fitting;
  if (kernel->declared_threads && kernel->declared_threads < kernel->max_threads)
    kernel->max_threads = kernel->declared_threads;
  kernel->dynamic_shared -= kernel->static_shared;
  return NG_OK;
}

static struct ng_kernel *known(const struct ng_image *image, const char *name)
{
  struct ng_kernel *kernel = image->kernels;
  while (kernel && strcmp(kernel->name, name))
    kernel = kernel->next;
  return kernel;
}

int ng_image_kernel(struct ng_image *image, const char *name, struct ng_kernel **kernel)
{
  pthread_mutex_lock(&lock);
  struct ng_kernel *found = known(image, name);
  int error = NG_OK;
  if (!found && (found = calloc(1, sizeof *found))) {
    snprintf(found->name, sizeof found->name, "%s", name);
    found->max_threads = ng_attribute(MAX_THREADS_PER_BLOCK);
    found->dynamic_shared = ng_attribute(SHARED_PER_BLOCK);
    found->carveout = -1; /* the driver's own choice */
    error = image->data ? inspect(image->data, found) : NG_OK;
    if (error) {
      free(found);
    } else {
      found->next = image->kernels;
      image->kernels = found;
    }
  }
  pthread_mutex_unlock(&lock);
  if (!error && !found)
    error = NG_OUT_OF_MEMORY;
  if (!error)
    *kernel = found;
  return error;
}

int ng_max_dynamic_shared(const struct ng_kernel *kernel)
{
  return ng_attribute(SHARED_OPT_IN) - kernel->static_shared;
}

int ng_blocks_per_sm(const struct ng_kernel *kernel, int threads, size_t dynamic_shared)
{
  int warps = round_up(threads > 0 ? threads : 1, WARP) / WARP;
  int blocks = ng_attribute(BLOCKS_PER_SM);
  int by_threads = ng_attribute(THREADS_PER_SM) / (warps * WARP);
  int by_registers = warps_by_registers(kernel, ng_attribute(REGISTERS_PER_SM)) / warps;
  long shared = kernel->static_shared + (long)dynamic_shared + ng_attribute(RESERVED_PER_BLOCK);
  int by_shared = (int)(ng_attribute(SHARED_PER_SM) / (shared ? shared : 1));
  if (by_threads < blocks)
    blocks = by_threads;
  if (kernel->inspected && by_registers < blocks)
    blocks = by_registers;
  return by_shared < blocks ? by_shared : blocks;
}

/* In the order of the NVIDIA driver's answers: shapes and limits first, registers last. */
int ng_check_launch(const struct ng_kernel *kernel, const unsigned grid[3], const unsigned block[3],
                    unsigned dynamic_shared)
{
  for (int i = 0; i < 3; i++) {
    if (!grid[i] || !block[i] || grid[i] > (unsigned)ng_attribute(MAX_GRID_X + i) ||
        block[i] > (unsigned)ng_attribute(MAX_BLOCK_X + i))
      return NG_INVALID_VALUE;
    if (kernel->required_block[0] && block[i] != kernel->required_block[i])
      return NG_INVALID_VALUE;
  }
  unsigned long threads = (unsigned long)block[0] * block[1] * block[2];
  if (threads > (unsigned long)ng_attribute(MAX_THREADS_PER_BLOCK) || (long)dynamic_shared > kernel->dynamic_shared)
    return NG_INVALID_VALUE;
  if (kernel->declared_threads && threads > (unsigned long)kernel->declared_threads)
    return NG_INVALID_VALUE;
  if (threads > (unsigned long)kernel->max_threads)
    return NG_LAUNCH_OUT_OF_RESOURCES;
  ng_log(3, "launch %s", kernel->name);
  return NG_OK;
}
