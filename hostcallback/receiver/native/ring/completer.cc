#include "ring/completer.h"

#include <pthread.h>

#include <condition_variable>
#include <deque>
#include <mutex>
#include <new>

namespace hcb {
namespace {

constexpr size_t kMaxIdle = 4;

struct Pool {
  std::mutex mutex;  // protects everything below
  std::condition_variable arrived;
  std::deque<std::unique_ptr<Completion>> queue;
  size_t idle = 0;
};

// Never destroyed: the threads outlive main.
Pool* ThePool() {
  static Pool* pool = new Pool;
  return pool;
}

void* RunPool(void* argument) {
  Pool* pool = static_cast<Pool*>(argument);
  std::unique_lock<std::mutex> lock(pool->mutex);
  for (;;) {
    while (!pool->queue.empty()) {
      std::unique_ptr<Completion> completion = std::move(pool->queue.front());
      pool->queue.pop_front();
      lock.unlock();
      completion->Complete();
      completion.reset();
      lock.lock();
    }
    if (pool->idle == kMaxIdle) return nullptr;
    ++pool->idle;
    pool->arrived.wait(lock, [pool] { return !pool->queue.empty(); });
    --pool->idle;
  }
}

bool StartThread(Pool* pool) {
  pthread_t thread;
  if (pthread_create(&thread, nullptr, RunPool, pool) != 0) return false;
  pthread_detach(thread);
  return true;
}

}  // namespace

void CompleteElsewhere(std::unique_ptr<Completion> completion) {
  Pool* pool = ThePool();
  bool start;
  {
    std::lock_guard<std::mutex> lock(pool->mutex);
    pool->queue.push_back(std::move(completion));
    start = pool->queue.size() > pool->idle;  // each entry needs a separate thread, since any may take long
  }
  if (!start) {
    pool->arrived.notify_one();
    return;
  }
  if (StartThread(pool)) return;
  // The system has no thread left. Unless another thread has taken the completion meanwhile, this thread must
  // do it, even if it takes long.
  std::unique_ptr<Completion> left;
  {
    std::lock_guard<std::mutex> lock(pool->mutex);
    if (!pool->queue.empty()) {
      left = std::move(pool->queue.back());
      pool->queue.pop_back();
    }
  }
  if (left) left->Complete();
}

void ResetCompletersAfterFork() { new (ThePool()) Pool; }

}  // namespace hcb
