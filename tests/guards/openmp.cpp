// The functions of the OpenMP runtime that the extension calls. They are for the thread sanitizer, which does not know
// how libgomp synchronises. The iterations of a loop are distributed over the threads in turn, whatever its schedule.
// Threads share no state for this, so every thread has some iterations even in a small loop, and only the begin and end
// of threads and barriers order the threads. A parallel region inside another has one thread.
#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <vector>

namespace {

struct Team {
  const int threads;
  void (*const function)(void*);
  void* const data;
  std::atomic<int> waiting{0};
  std::atomic<long> barriers{0};

  void wait() {
    const long barrier = barriers.load(std::memory_order_acquire);
    if (waiting.fetch_add(1, std::memory_order_acq_rel) == threads - 1) {
      waiting.store(0, std::memory_order_relaxed);
      barriers.store(barrier + 1, std::memory_order_release);
    } else {
      while (barriers.load(std::memory_order_acquire) == barrier) sched_yield();
    }
  }
};

// A loop of the calling thread: its iterations are `chunk` iterations in every `step`, from `next` on.
struct Loop {
  unsigned long long next, end, chunk, step;
};

thread_local Team* team = nullptr;
thread_local int number = 0;
thread_local Loop loop;

template <class Int>
bool take(Int* first, Int* last) {
  if (loop.next >= loop.end) return false;
  *first = Int(loop.next);
  *last = Int(loop.end - loop.next < loop.chunk ? loop.end : loop.next + loop.chunk);
  loop.next += loop.step;
  return true;
}

// Begins the next loop, which goes upwards from 0 or above in steps of 1, like all loops of the extension.
template <class Int>
bool begin(Int start, Int end, Int chunk, Int* first, Int* last) {
  const unsigned long long size = chunk, threads = team ? team->threads : 1;
  loop = {start + size * number, (unsigned long long)end, size, size * threads};
  return take(first, last);
}

struct Member {
  Team* team;
  int number;
};

void* work(void* member) {
  const Member mine = *static_cast<Member*>(member);
  Team* const outer = team;
  const int outer_number = number;
  const Loop outer_loop = loop;
  team = mine.team, number = mine.number;
  team->function(team->data);
  team = outer, number = outer_number, loop = outer_loop;
  return nullptr;
}

}  // namespace

extern "C" {

void GOMP_parallel(void (*function)(void*), void* data, unsigned threads, unsigned) {
  Team mine{team || threads == 0 ? 1 : int(threads), function, data};
  std::vector<Member> members;
  for (int i = 0; i < mine.threads; ++i) members.push_back({&mine, i});
  std::vector<pthread_t> others(mine.threads - 1);
  for (int i = 1; i < mine.threads; ++i) pthread_create(&others[i - 1], nullptr, work, &members[i]);
  work(&members[0]);
  for (pthread_t other : others) pthread_join(other, nullptr);
}
void GOMP_barrier() {
  if (team) team->wait();
}
void GOMP_loop_end() { GOMP_barrier(); }
void GOMP_loop_end_nowait() {}
bool GOMP_loop_nonmonotonic_dynamic_start(long start, long end, long, long chunk, long* first, long* last) {
  return begin(start, end, chunk, first, last);
}
bool GOMP_loop_nonmonotonic_dynamic_next(long* first, long* last) { return take(first, last); }
bool GOMP_loop_ull_nonmonotonic_dynamic_start(bool, unsigned long long start, unsigned long long end,
                                              unsigned long long, unsigned long long chunk, unsigned long long* first,
                                              unsigned long long* last) {
  return begin(start, end, chunk, first, last);
}
bool GOMP_loop_ull_nonmonotonic_dynamic_next(unsigned long long* first, unsigned long long* last) {
  return take(first, last);
}
int omp_get_num_threads() { return team ? team->threads : 1; }
int omp_get_thread_num() { return number; }
}
