// Preloaded: a disk that is full once a process has written FULL_AFTER bytes at places of files.
#include <cerrno>
#include <cstdlib>
#include <dlfcn.h>
#include <sys/types.h>

static size_t written = 0;

extern "C" ssize_t pwrite64(int file, const void *bytes, size_t count, off64_t at) {
  using Call = ssize_t (*)(int, const void *, size_t, off64_t);
  static Call real = reinterpret_cast<Call>(dlsym(RTLD_NEXT, "pwrite64"));
  const char *most = getenv("FULL_AFTER");
  if (most != nullptr && written + count > strtoull(most, nullptr, 10)) {
    errno = ENOSPC;
    return -1;
  }
  ssize_t done = real(file, bytes, count, at);
  if (done > 0) written += static_cast<size_t>(done);
  return done;
}
