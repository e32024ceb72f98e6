// Preloaded: a disk that is full once a process has written FULL_AFTER bytes at places of files,
// and a file system that fails with the number NO_LOCKS when a file or folder is to be locked.
#include <cerrno>
#include <cstdlib>
#include <dlfcn.h>
#include <sys/file.h>
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

extern "C" int flock(int file, int how) noexcept {
  using Call = int (*)(int, int);
  static Call real = reinterpret_cast<Call>(dlsym(RTLD_NEXT, "flock"));
  const char *number = getenv("NO_LOCKS");
  if (number == nullptr) return real(file, how);
  errno = atoi(number);
  return -1;
}
