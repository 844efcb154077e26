#include "os/sigterm.h"

#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>

namespace hcb {
namespace {

// Two slots, so that a signal during WatchTermination finds a complete one.
struct sigaction previous[2];
std::atomic<int> current{0};
std::atomic<int32_t> pipe_fd{-1};
std::atomic<pid_t> owner{0};
std::atomic<bool> is_inside{false};

bool IsDefault(const struct sigaction& action) {
  return (action.sa_flags & SA_SIGINFO) == 0 && action.sa_handler == SIG_DFL;
}

void OnTermination(int number, siginfo_t* info, void* context) {
  const int saved_errno = errno;
  const struct sigaction next = previous[current.load()];
  if (getpid() != owner.load()) {
    // A forked child inherits the handler but not the thread: act as if this handler did not exist.
    sigaction(number, &next, nullptr);
    raise(number);
    errno = saved_errno;
    return;
  }
  const char byte = 0;
  if (write(pipe_fd.load(), &byte, 1) < 0) {
    // The pipe is full: the thread has been woken already.
  }
  // A handler that replaced this one may chain to it, and so call it a second time.
  if (!is_inside.exchange(true)) {
    if ((next.sa_flags & SA_SIGINFO) != 0) {
      next.sa_sigaction(number, info, context);
    } else if (next.sa_handler != SIG_DFL && next.sa_handler != SIG_IGN) {
      next.sa_handler(number);
    }
    is_inside.store(false);
  }
  errno = saved_errno;
}

bool IsOurs(const struct sigaction& action) {
  return (action.sa_flags & SA_SIGINFO) != 0 && action.sa_sigaction == OnTermination;
}

}  // namespace

bool WatchTermination(int32_t fd) {
  pipe_fd.store(fd);
  owner.store(getpid());
  struct sigaction found;
  if (sigaction(SIGTERM, nullptr, &found) == 0 && !IsOurs(found)) {
    const int slot = 1 - current.load();
    previous[slot] = found;
    current.store(slot);
    struct sigaction ours = {};
    ours.sa_sigaction = OnTermination;
    ours.sa_flags = SA_SIGINFO | SA_RESTART | SA_ONSTACK;
    sigemptyset(&ours.sa_mask);
    sigaction(SIGTERM, &ours, nullptr);
  }
  return IsDefault(previous[current.load()]);
}

void UnwatchTermination() {
  struct sigaction found;
  if (sigaction(SIGTERM, nullptr, &found) == 0 && IsOurs(found)) {
    sigaction(SIGTERM, &previous[current.load()], nullptr);
  }
}

}  // namespace hcb
