// The threads of one call. Each thread takes its own rows through all layers, so most of the data that it reads were
// written by the same thread.
#pragma once

#include <omp.h>

#include <atomic>
#include <exception>

#include "common/plan.h"
#include "layers/call.h"

namespace cmab::cpu {

class Crew {
 public:
  // A thread of the crew.
  class Member {
   public:
    const int number, threads;

    Member(Crew& crew, int number, int threads) : number(number), threads(threads), crew_(crew) {}

    // This thread's rows of `sets` sets: whole sets if every thread gets the same number of sets.
    Rows share(int64_t sets, int64_t rows_of_set) const {
      const int64_t unit = has_sets(sets) ? std::max<int64_t>(rows_of_set, 1) : kRowStep, count = sets * rows_of_set;
      const int64_t first = piece_start(count, threads, number, unit);
      return {first, piece_start(count, threads, number + 1, unit) - first};
    }
    bool has_sets(int64_t sets) const { return sets % threads == 0; }
    // This thread as the only thread, with all rows.
    Member alone() const { return {crew_, 0, 1}; }

    // Does a part of the work, unless a part in any thread has already thrown an exception.
    template <class Work>
    void run(Work work) const {
      if (crew_.failed_) return;
      try {
        work();
      } catch (...) {
        if (!crew_.failed_.exchange(true)) crew_.error_ = std::current_exception();
      }
    }
    // Returns when all threads have called this. Returns at once if each thread has its own sets, because sets do not
    // depend on each other.
    void wait(int64_t sets) const {
      if (has_sets(sets)) return;
#pragma omp barrier
    }

   private:
    Crew& crew_;
  };

  // Calls work(member) on each of up to `threads` threads. When all have returned, rethrows an exception that a part
  // has thrown.
  template <class Work>
  static void run(int threads, Work work) {
    Crew crew;
#pragma omp parallel num_threads(threads)
    {
      const FlushToZero flush;
      work(Member(crew, omp_get_thread_num(), omp_get_num_threads()));
    }
    if (crew.error_) std::rethrow_exception(crew.error_);
  }

 private:
  std::atomic<bool> failed_{false};
  std::exception_ptr error_;
};

// Computes the steps of an attention layer after its projections: fills the member's rows of y, which may be x.
void attend(const AttentionLayer&, const Rows&, const AttentionKept&, const Crew::Member&, void* y);

}  // namespace cmab::cpu
