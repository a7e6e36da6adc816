// The functions of OpenMP's run time that the extension calls, on threads of the standard library: the thread sanitizer
// knows how these synchronise, and nothing of libgomp. A parallel region inside another has one thread.
#include <algorithm>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

namespace {

// A loop that a team shares: the iterations that nobody has taken.
struct Loop {
  unsigned long long next, end, chunk;
};

struct Team {
  int threads = 1;
  std::mutex mutex;
  std::condition_variable all_here;
  int waiting = 0;
  long barriers = 0;
  std::deque<Loop> loops;  // of the region so far: a thread may be in one while another has begun the next

  void wait() {
    std::unique_lock<std::mutex> lock(mutex);
    const long barrier = barriers;
    if (++waiting == threads) {
      waiting = 0, ++barriers;
      all_here.notify_all();
    } else {
      all_here.wait(lock, [&] { return barriers != barrier; });
    }
  }
};

thread_local Team* team = nullptr;
thread_local int number = 0;
thread_local size_t loops_begun = 0;

// Takes iterations [first, last) of the thread's loop; false if none is left.
template <class Int>
bool take(Int* first, Int* last) {
  std::lock_guard<std::mutex> lock(team->mutex);
  Loop& loop = team->loops[loops_begun - 1];
  if (loop.next >= loop.end) return false;
  *first = Int(loop.next);
  loop.next = std::min(loop.next + loop.chunk, loop.end);
  *last = Int(loop.next);
  return true;
}

// Begins the next loop, which goes upwards from 0 or above in steps of 1, as those of the extension do.
template <class Int>
bool begin(Int start, Int end, Int chunk, Int* first, Int* last) {
  {
    std::lock_guard<std::mutex> lock(team->mutex);
    if (++loops_begun > team->loops.size())
      team->loops.push_back({(unsigned long long)start, (unsigned long long)end, (unsigned long long)chunk});
  }
  return take(first, last);
}

void work(Team* mine, int thread, void (*function)(void*), void* data) {
  Team* const outer = team;
  const int outer_number = number;
  const size_t outer_loops = loops_begun;
  team = mine, number = thread, loops_begun = 0;
  function(data);
  team = outer, number = outer_number, loops_begun = outer_loops;
}

}  // namespace

extern "C" {

void GOMP_parallel(void (*function)(void*), void* data, unsigned threads, unsigned) {
  Team mine;
  mine.threads = team || threads == 0 ? 1 : int(threads);
  std::vector<std::thread> others;
  for (int i = 1; i < mine.threads; ++i) others.emplace_back(work, &mine, i, function, data);
  work(&mine, 0, function, data);
  for (std::thread& other : others) other.join();
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
