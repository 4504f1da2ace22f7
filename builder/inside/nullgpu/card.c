/* The card: read from the environment once, before anything else of the process runs. Also the log and the error texts.
 */
#define _GNU_SOURCE
#include "nullgpu.h"
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* The launcher (blackwell.nullgpu) sets this; a job that preloads the library by accident does not have it. */
#define SWITCH "NULLGPU_ON"
#define SWITCH_VALUE "results-are-garbage"

enum { CAPABILITY_MAJOR = 75, CAPABILITY_MINOR = 76 };

static struct ng_card card = {.count = 1};
static int attributes[NG_MAX_ATTRIBUTES];
static char present[NG_MAX_ATTRIBUTES];
static __thread char refused[128];

static void die(const char *why, const char *what)
{
  fprintf(stderr, "null GPU: %s%s. Start it through `blackwell warm` or `blackwell step --device null`.\n", why, what);
  _exit(99);
}

long ng_setting(const char *variable, long otherwise)
{
  const char *text = getenv(variable);
  return text && *text ? strtol(text, NULL, 0) : otherwise;
}

void ng_log(int level, const char *format, ...)
{
  static int wanted = -1;
  if (wanted < 0)
    wanted = (int)ng_setting("NULLGPU_LOG", 0);
  if (level > wanted)
    return;
  va_list arguments;
  va_start(arguments, format);
  flockfile(stderr);
  fputs("null GPU: ", stderr);
  vfprintf(stderr, format, arguments);
  fputc('\n', stderr);
  funlockfile(stderr);
  va_end(arguments);
}

/* NULLGPU_CARD is "name=NVIDIA B200;memory=...;driver=13000;75=10;76=0;...": attribute numbers are those of
 * CUdevice_attribute. */
static void read_card(const char *text)
{
  char *copy = strdup(text);
  for (char *rest, *item = strtok_r(copy, ";", &rest); item; item = strtok_r(NULL, ";", &rest)) {
    char *value = strchr(item, '=');
    if (!value)
      die("NULLGPU_CARD has no '=' in ", item);
    *value++ = 0;
    if (!strcmp(item, "name")) {
      snprintf(card.name, sizeof card.name, "%s", value);
    } else if (!strcmp(item, "memory")) {
      card.memory = strtoull(value, NULL, 10);
    } else if (!strcmp(item, "driver")) {
      card.driver = atoi(value);
    } else {
      int id = atoi(item);
      if (id <= 0 || id >= NG_MAX_ATTRIBUTES)
        die("NULLGPU_CARD has an unknown key ", item);
      attributes[id] = atoi(value);
      present[id] = 1;
    }
  }
  free(copy);
  if (!*card.name || !card.memory || !card.driver || !present[CAPABILITY_MAJOR] || !present[CAPABILITY_MINOR])
    die("NULLGPU_CARD lacks one of name, memory, driver, 75 and 76 (compute capability)", "");
}

__attribute__((constructor(101))) static void start(void)
{
  const char *on = getenv(SWITCH);
  const char *profile = getenv("NULLGPU_CARD");
  if (!on || strcmp(on, SWITCH_VALUE))
    die("preloaded, but not switched on (" SWITCH " is not set)", "");
  if (!profile)
    die("switched on without a card (NULLGPU_CARD is not set)", "");
  /* Beside a real NVIDIA driver somebody could take these results for a real run's. */
  if ((!access("/dev/nvidia0", F_OK) || !access("/proc/driver/nvidia/version", F_OK)) &&
      !ng_setting("BLACKWELL_NULLGPU_BESIDE_DRIVER", 0))
    die("a real NVIDIA driver is visible here; set BLACKWELL_NULLGPU_BESIDE_DRIVER=1 to run beside it", "");
  read_card(profile);
  card.count = (int)ng_setting("NULLGPU_COUNT", 1);
  if (card.count < 1 || card.count > NG_MAX_DEVICES)
    die("NULLGPU_COUNT must be 1 to 16, not ", getenv("NULLGPU_COUNT"));
}

const struct ng_card *ng_card(void)
{
  return &card;
}

int ng_has_attribute(int id)
{
  return id > 0 && id < NG_MAX_ATTRIBUTES && present[id];
}

int ng_attribute(int id)
{
  return ng_has_attribute(id) ? attributes[id] : 0;
}

int ng_architecture(void)
{
  return attributes[CAPABILITY_MAJOR] * 10 + attributes[CAPABILITY_MINOR];
}

int ng_refuse(const char *symbol, int code)
{
  ng_log(1, "refused %s", symbol);
  snprintf(refused, sizeof refused, "%s", symbol);
  return code;
}

static const struct {
  int code;
  const char *name, *text;
} errors[] = {
    {NG_OK, "SUCCESS", "no error"},
    {NG_INVALID_VALUE, "INVALID_VALUE", "invalid argument"},
    {NG_OUT_OF_MEMORY, "OUT_OF_MEMORY", "out of memory"},
    {NG_NOT_INITIALIZED, "NOT_INITIALIZED", "integer truth is not loaded in this process, shapes would be wrong"},
    {NG_NO_DEVICE, "NO_DEVICE", "no device"},
    {NG_INVALID_DEVICE, "INVALID_DEVICE", "invalid device ordinal"},
    {NG_INVALID_IMAGE, "INVALID_IMAGE", "device kernel image is invalid"},
    {NG_INVALID_CONTEXT, "INVALID_CONTEXT", "invalid device context"},
    {NG_NO_BINARY_FOR_GPU, "NO_BINARY_FOR_GPU", "no kernel image is available for this card"},
    {NG_FILE_NOT_FOUND, "FILE_NOT_FOUND", "file not found"},
    {NG_INVALID_HANDLE, "INVALID_HANDLE", "invalid resource handle"},
    {NG_NOT_FOUND, "NOT_FOUND", "named symbol not found"},
    {NG_LAUNCH_OUT_OF_RESOURCES, "LAUNCH_OUT_OF_RESOURCES", "too many resources requested for launch"},
};

const char *ng_error_name(int code)
{
  for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
    if (errors[i].code == code)
      return errors[i].name;
  return code == NG_NOT_SUPPORTED ? "NOT_SUPPORTED" : "UNKNOWN";
}

const char *ng_error_text(int code)
{
  static __thread char text[256];
  if (code == NG_OK)
    return "no error";
  const char *what = "unknown error";
  for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
    if (errors[i].code == code)
      what = errors[i].text;
  if (code == NG_NOT_SUPPORTED && *refused)
    snprintf(text, sizeof text, "the null GPU doesn't implement %s", refused);
  else
    snprintf(text, sizeof text, "%s (null GPU)", what);
  return text;
}
