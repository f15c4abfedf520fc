// Threads that help the one that asks with the parts of a step.
//
// They are started once, sleep in the kernel and never need Python's lock: waking one costs a step some 10 us, starting
// one would cost more than it saves. The asking thread takes parts too, and waits for nothing but parts that a helper
// has taken: without a helper, or with one that is not awake in time, it does all of them.
//
// Invariants: a part is done by one thread; `run` returns when all parts are done. In a process that was forked there
// are no helpers, and steps are done without.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

#include <sched.h>
#include <semaphore.h>
#include <unistd.h>

namespace drafting {

class StepThreads {
public:
    // `work` does the part of a number, and must not throw.
    StepThreads(int helpers, std::function<void(std::size_t)> work) : work_(std::move(work)), owner_(getpid()) {
        sem_init(&wake_, 0, 0);
        for (int number = 0; number < helpers; ++number) threads_.emplace_back([this] { help(); });
    }
    StepThreads(const StepThreads&) = delete;
    StepThreads& operator=(const StepThreads&) = delete;

    ~StepThreads() {
        ending_.store(true, std::memory_order_release);
        for (std::thread& thread : threads_) {
            if (owner_ == getpid()) {
                sem_post(&wake_);
            } else {
                // It is the other process's.
                thread.detach();
            }
        }
        for (std::thread& thread : threads_)
            if (thread.joinable()) thread.join();
        sem_destroy(&wake_);
    }

    // Do so many parts, with or without helpers.
    void run(std::size_t parts, bool helped) {
        finished_.store(0, std::memory_order_relaxed);
        parts_ = static_cast<std::int64_t>(parts);
        left_.store(parts_, std::memory_order_release);
        const std::size_t woken = helped && parts ? std::min(threads_.size(), parts - 1) : 0;
        for (std::size_t number = 0; number < woken; ++number) sem_post(&wake_);
        while (do_next()) {
        }
        while (finished_.load(std::memory_order_acquire) < parts_) sched_yield();
    }

private:
    // Do a part that nobody has taken; false: there is none.
    bool do_next() {
        if (left_.load(std::memory_order_acquire) <= 0) return false;
        const std::int64_t left = left_.fetch_sub(1, std::memory_order_acq_rel);
        if (left <= 0) return false;
        work_(static_cast<std::size_t>(parts_ - left));
        finished_.fetch_add(1, std::memory_order_release);
        return true;
    }

    void help() {
        while (!ending_.load(std::memory_order_acquire)) {
            sem_wait(&wake_);
            while (do_next()) {
            }
        }
    }

    std::function<void(std::size_t)> work_;
    pid_t owner_;
    sem_t wake_;
    std::atomic<bool> ending_{false};
    // Parts of the step; those that nobody has taken yet (below 0: nobody asks any more); and those that are done. Each
    // on a cache line of its own.
    std::int64_t parts_ = 0;
    alignas(64) std::atomic<std::int64_t> left_{0};
    alignas(64) std::atomic<std::int64_t> finished_{0};
    std::vector<std::thread> threads_;
};

}  // namespace drafting
