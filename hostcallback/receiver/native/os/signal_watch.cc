// Handlers of SIGTERM and SIGINT that run before the other handlers: a byte in a pipe wakes a thread of the
// host.
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>

#include "abi/exports.h"
#include "os/interpreter.h"

namespace {

using hcb::IsFinalizing;

struct Watch {
  // Two slots, so that a signal while a handler is being installed finds a complete one.
  struct sigaction previous[2];
  std::atomic<int> current{0};
  std::atomic<int32_t> pipe_fd{-1};
  std::atomic<pid_t> owner{0};
  std::atomic<bool> is_inside{false};
};

Watch termination;
Watch interrupt;
std::atomic<int32_t> holds_interrupt{0};

bool IsHandler(const struct sigaction& action) {
  return (action.sa_flags & SA_SIGINFO) != 0 ||
         (action.sa_handler != SIG_DFL && action.sa_handler != SIG_IGN);
}

// The value of a signal that only ends a wait.
char wake;

bool IsWake(const siginfo_t* info) { return info->si_code == SI_QUEUE && info->si_value.sival_ptr == &wake; }

bool IsDefault(const struct sigaction& action) {
  return (action.sa_flags & SA_SIGINFO) == 0 && action.sa_handler == SIG_DFL;
}

void OnSignal(int number, siginfo_t* info, void* context) {
  if (IsWake(info)) return;
  const int saved_errno = errno;
  Watch& watch = number == SIGINT ? interrupt : termination;
  const struct sigaction next = watch.previous[watch.current.load()];
  if (getpid() != watch.owner.load() || (number == SIGTERM && IsFinalizing())) {
    // A forked child inherits the handler but not the thread, and while Python ends the thread does not run
    // any more: act as if this handler did not exist.
    sigaction(number, &next, nullptr);
    raise(number);
    errno = saved_errno;
    return;
  }
  // Before the byte, which wakes the thread that asks whether it was held.
  const bool held = number == SIGINT && !IsFinalizing() && holds_interrupt.exchange(0) != 0;
  const char byte = 0;
  if (write(watch.pipe_fd.load(), &byte, 1) < 0) {
    // The pipe is full: the thread has been woken already.
  }
  if (held) {
    errno = saved_errno;
    return;
  }
  // A handler that replaced this one may chain to it, and so call it a second time.
  if (!watch.is_inside.exchange(true)) {
    if ((next.sa_flags & SA_SIGINFO) != 0) {
      next.sa_sigaction(number, info, context);
    } else if (IsHandler(next)) {
      next.sa_handler(number);
    }
    watch.is_inside.store(false);
  }
  errno = saved_errno;
}

bool IsOurs(const struct sigaction& action) {
  return (action.sa_flags & SA_SIGINFO) != 0 && action.sa_sigaction == OnSignal;
}

// Whether ours is not the current action, which is `found`. From now on the byte goes to `fd`.
bool MustInstall(int number, Watch* watch, int32_t fd, struct sigaction* found) {
  watch->pipe_fd.store(fd);
  watch->owner.store(getpid());
  *found = {};
  return sigaction(number, nullptr, found) == 0 && !IsOurs(*found);
}

void Install(int number, Watch* watch, const struct sigaction& found, int flags) {
  const int slot = 1 - watch->current.load();
  watch->previous[slot] = found;
  watch->current.store(slot);
  struct sigaction ours = {};
  ours.sa_sigaction = OnSignal;
  ours.sa_flags = SA_SIGINFO | SA_ONSTACK | flags;
  sigemptyset(&ours.sa_mask);
  sigaction(number, &ours, nullptr);
}

void Restore(int number, const Watch& watch) {
  struct sigaction found;
  if (sigaction(number, nullptr, &found) == 0 && IsOurs(found)) {
    sigaction(number, &watch.previous[watch.current.load()], nullptr);
  }
}

}  // namespace

int32_t hcb_watch_termination(int32_t fd) {
  IsFinalizing();  // looks the function up
  const Watch& watch = termination;
  struct sigaction found;
  if (MustInstall(SIGTERM, &termination, fd, &found)) Install(SIGTERM, &termination, found, SA_RESTART);
  return IsDefault(watch.previous[watch.current.load()]);
}

void hcb_unwatch_termination(void) { Restore(SIGTERM, termination); }

int32_t hcb_watch_interrupt(int32_t fd) {
  IsFinalizing();  // looks the function up
  struct sigaction found;
  if (!MustInstall(SIGINT, &interrupt, fd, &found)) return IsOurs(found);
  if (!IsHandler(found)) return 0;
  // Interrupted system calls return, as with the handler that Python installs: it looks for signals then.
  Install(SIGINT, &interrupt, found, found.sa_flags & SA_RESTART);
  return 1;
}

int32_t hcb_hold_interrupt(int32_t on) { return holds_interrupt.exchange(on); }

void hcb_end_wait(uint64_t thread) {
#ifdef __GLIBC__
  struct sigaction found;
  if (sigaction(SIGINT, nullptr, &found) != 0 || !IsOurs(found)) return;
  union sigval value;
  value.sival_ptr = &wake;
  pthread_sigqueue(static_cast<pthread_t>(thread), SIGINT, value);
#else
  (void)thread;
#endif
}

void hcb_unwatch_interrupt(void) { Restore(SIGINT, interrupt); }
