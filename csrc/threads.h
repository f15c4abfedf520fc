// Threads that help the calling thread with the parts of a step.
//
// They are started once, sleep in the kernel and never need Python's lock. Waking one takes about 10 us; starting one
// would take longer than it saves. The calling thread does parts too and waits only for parts that a helper has begun:
// if no helper is awake in time, the calling thread does all parts.
//
// Invariants: each part is done by one thread; `run` returns when all parts are done. A forked process has no helpers,
// and its steps are done without.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <semaphore>
#include <thread>
#include <vector>

#include <unistd.h>

namespace drafting {

class StepThreads {
public:
    // `work` does the part of that number, and must not throw.
    StepThreads(int helpers, std::function<void(std::size_t)> work) : work_(std::move(work)), owner_(getpid()) {
        for (int number = 0; number < helpers; ++number) threads_.emplace_back([this] { help(); });
    }
    StepThreads(const StepThreads&) = delete;
    StepThreads& operator=(const StepThreads&) = delete;

    ~StepThreads() {
        ending_.store(true, std::memory_order_release);
        wake_.release(static_cast<std::ptrdiff_t>(threads_.size()));
        for (std::thread& thread : threads_) {
            // After a fork the threads belong to the other process.
            if (owner_ == getpid())
                thread.join();
            else
                thread.detach();
        }
    }

    // Do all parts, with helpers or without.
    void run(std::size_t parts, bool helped) {
        finished_.store(0, std::memory_order_relaxed);
        parts_ = static_cast<std::int64_t>(parts);
        left_.store(parts_, std::memory_order_release);
        if (helped && parts) wake_.release(static_cast<std::ptrdiff_t>(std::min(threads_.size(), parts - 1)));
        while (do_next()) {
        }
        while (finished_.load(std::memory_order_acquire) < parts_) std::this_thread::yield();
    }

private:
    // Do a part that no thread has begun; return false if there is none.
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
            wake_.acquire();
            while (do_next()) {
            }
        }
    }

    std::function<void(std::size_t)> work_;
    pid_t owner_;
    std::counting_semaphore<> wake_{0};
    std::atomic<bool> ending_{false};
    // The step's parts, parts that no thread has begun (may fall below 0), and parts that are done; the counters on
    // cache lines of their own.
    std::int64_t parts_ = 0;
    alignas(64) std::atomic<std::int64_t> left_{0};
    alignas(64) std::atomic<std::int64_t> finished_{0};
    std::vector<std::thread> threads_;
};

}  // namespace drafting
