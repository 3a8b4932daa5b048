// Streams: a queue of work each, done by a thread of its own as late as it may be.
#pragma once
#include <c10/core/Stream.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>

#include "order.h"

namespace sim {

constexpr c10::DeviceType CUDA = c10::DeviceType::CUDA;

class Queue {
 public:
  explicit Queue(int device);
  const int device;
  const Actor actor;
  Clock clock;  // under order_mutex

  int64_t push(std::function<void()> work);
  int64_t last();
  bool done(int64_t number);
  void demand(int64_t number);  // someone waits for it: it may be late no longer
  void wait(int64_t number);    // without the GIL, which a stream may need to drop a tensor
  Clock seen();

 private:
  void loop();
  struct Work {
    std::function<void()> run;
    std::chrono::steady_clock::time_point since;
  };
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Work> work_;
  int64_t pushed_ = 0, finished_ = 0, demanded_ = 0;
  bool runs_ = false;  // whether it has a thread
};

// A moment of a stream.
struct Moment {
  Queue* queue;
  int64_t number;
  Clock clock;
  std::shared_ptr<std::chrono::steady_clock::time_point> at;  // of events with timing
};

struct State {
  int devices = 1;
  int sync_mode = 0;  // as torch.cuda.set_sync_debug_mode
  int patience_ms = 50;  // how late work may be that nobody waits for: other ranks may
};
State& state();

int current_device();
void set_current_device(int index);  // checked
int exchange_device(int index);
c10::Stream current_stream(int device);
void set_current_stream(c10::Stream stream);
c10::Stream new_stream(int device);
Queue& queue_of(const c10::Stream& stream);
Queue& current_queue(int device);

Moment moment_of(Queue& queue, bool timed = false);
void wait_on_stream(Queue& queue, const Moment& moment);
void wait_on_host(const Moment& moment);
bool is_over(const Moment& moment);  // the host learns of it
void synchronize_stream(Queue& queue);
void synchronize_device();
void end_streams(std::chrono::milliseconds patience);  // before the interpreter ends
void start_synchronizing(const std::string& what);  // set_sync_debug_mode: counts, warns, refuses
void keep_error(std::exception_ptr error);  // raised by the next call that may
void raise_late_errors();
bool on_a_stream();  // whether this thread is one of a stream

bool in_bad_fork();

}  // namespace sim
