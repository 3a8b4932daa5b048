#include "streams.h"

#include <ATen/Parallel.h>
#include <Python.h>
#include <c10/core/Device.h>
#include <c10/util/Exception.h>
#include <pthread.h>

#include <map>
#include <thread>

#include "counts.h"

namespace sim {

using Clocks = std::chrono::steady_clock;

State& state() { static auto* one = new State; return *one; }

static thread_local bool t_on_stream = false;
bool on_a_stream() { return t_on_stream; }

namespace {
std::mutex g_queues_mutex;  // of the queues' table and the late error
std::map<std::pair<int, c10::StreamId>, Queue*>& queues() { static auto* one = new std::map<std::pair<int, c10::StreamId>, Queue*>; return *one; }
std::exception_ptr g_late;
std::mutex g_ending_mutex;
bool g_ending = false;
std::atomic<int64_t> g_finished{0};
constexpr auto IDLE = std::chrono::milliseconds(200);  // of a stream, before its thread ends: an engine makes many streams
std::atomic<c10::StreamId> g_next{1};
thread_local int t_device = 0;
thread_local std::map<int, c10::StreamId> t_streams;
bool g_started = false, g_bad_fork = false;

class NoGil {
 public:
  NoGil() { if (Py_IsInitialized() && PyGILState_Check()) state_ = PyEval_SaveThread(); }
  ~NoGil() { if (state_) PyEval_RestoreThread(state_); }
 private:
  PyThreadState* state_ = nullptr;
};
}  // namespace

bool in_bad_fork() { return g_bad_fork; }

// ---------------------------------------------------------------- the queue of a stream

Queue::Queue(int device) : device(device), actor(new_actor()) {}

int64_t Queue::push(std::function<void()> work) {
  std::lock_guard<std::mutex> lock(mutex_);
  work_.push_back({std::move(work), Clocks::now()});
  if (!runs_) std::thread([this] { loop(); }).detach();
  runs_ = true;
  changed_.notify_all();
  return ++pushed_;
}
int64_t Queue::last() { std::lock_guard<std::mutex> lock(mutex_); return pushed_; }
bool Queue::done(int64_t number) { std::lock_guard<std::mutex> lock(mutex_); return finished_ >= number; }
void Queue::demand(int64_t number) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (number > demanded_) demanded_ = number;
  changed_.notify_all();
}
void Queue::wait(int64_t number) {
  demand(number);
  NoGil unlocked;
  std::unique_lock<std::mutex> lock(mutex_);
  changed_.wait(lock, [&] { return finished_ >= number; });
}
Clock Queue::seen() { std::lock_guard<std::mutex> lock(order_mutex()); return clock; }

// Drops the tensors of work before anyone learns that it is done. That may need the GIL, which nobody gets once the interpreter ends.
static void drop(std::function<void()> work) {
  std::lock_guard<std::mutex> lock(g_ending_mutex);
  if (g_ending) new std::function<void()>(std::move(work));
  else work = nullptr;
}

void Queue::loop() {
  t_on_stream = true;
  at::set_num_threads(1);
  auto patience = std::chrono::milliseconds(state().patience_ms);
  while (true) {
    Work next;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      if (!changed_.wait_for(lock, IDLE, [&] { return !work_.empty(); })) {
        runs_ = false;
        return;
      }
      changed_.wait_until(lock, work_.front().since + patience, [&] { return demanded_ > finished_; });
      next = std::move(work_.front());
      work_.pop_front();
    }
    try {
      next.run();
    } catch (...) {
      keep_error(std::current_exception());
    }
    drop(std::move(next.run));
    std::lock_guard<std::mutex> lock(mutex_);
    finished_++;
    g_finished++;
    changed_.notify_all();
  }
}

// Some work may wait for a peer that is gone, so not for ever: as long as any work is done.
void end_streams(std::chrono::milliseconds patience) {
  NoGil unlocked;
  auto settled = std::make_shared<std::atomic<bool>>(false);
  std::thread([settled] {
    try {
      synchronize_device();
    } catch (...) {
    }
    *settled = true;
  }).detach();
  auto last = Clocks::now();
  for (int64_t before = -1; !*settled && Clocks::now() < last + patience; std::this_thread::sleep_for(std::chrono::milliseconds(5)))
    if (int64_t now = g_finished; now != before) before = now, last = Clocks::now();
  std::lock_guard<std::mutex> lock(g_ending_mutex);
  g_ending = true;
}

void keep_error(std::exception_ptr error) {
  std::lock_guard<std::mutex> lock(g_queues_mutex);
  if (!g_late) g_late = error;
}

void raise_late_errors() {
  std::exception_ptr late;
  {
    std::lock_guard<std::mutex> lock(g_queues_mutex);
    std::swap(late, g_late);
  }
  if (late) std::rethrow_exception(late);
}

// ---------------------------------------------------------------- current device and stream of a thread

int current_device() { return t_device; }
void set_current_device(int index) {
  TORCH_CHECK(index >= 0 && index < state().devices, "CUDA error: invalid device ordinal (", index, " of ", state().devices, ")");
  t_device = index;
}
int exchange_device(int index) {
  int before = t_device;
  if (index >= 0) set_current_device(index);
  return before;
}
c10::Stream current_stream(int device) {
  auto found = t_streams.find(device);
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(CUDA, device), found == t_streams.end() ? 0 : found->second);
}
void set_current_stream(c10::Stream stream) { t_streams[stream.device_index()] = stream.id(); }
c10::Stream new_stream(int device) { return c10::Stream(c10::Stream::UNSAFE, c10::Device(CUDA, device), g_next++); }
Queue& queue_of(const c10::Stream& stream) {
  std::lock_guard<std::mutex> lock(g_queues_mutex);
  if (!g_started) {  // a child has no threads of streams: CUDA cannot be used after a fork either
    g_started = true;
    pthread_atfork(nullptr, nullptr, [] { g_bad_fork = true; });
  }
  auto& queue = queues()[{stream.device_index(), stream.id()}];
  if (!queue) queue = new Queue(stream.device_index());
  return *queue;
}
Queue& current_queue(int device) { return queue_of(current_stream(device)); }

// ---------------------------------------------------------------- waits

Moment moment_of(Queue& queue, bool timed) {
  std::shared_ptr<Clocks::time_point> at;
  if (timed) {
    at = std::make_shared<Clocks::time_point>();
    queue.push([at] { *at = Clocks::now(); });
  }
  return {&queue, queue.last(), queue.seen(), at};
}

void wait_on_stream(Queue& queue, const Moment& moment) {
  {
    std::lock_guard<std::mutex> lock(order_mutex());
    queue.clock.join(moment.clock);
  }
  if (&queue != moment.queue && !moment.queue->done(moment.number))
    queue.push([other = moment.queue, number = moment.number] { other->wait(number); });
}

void wait_on_host(const Moment& moment) {
  moment.queue->wait(moment.number);
  host_learns(moment.clock);
  raise_late_errors();
}

bool is_over(const Moment& moment) {
  if (!moment.queue->done(moment.number)) return false;
  host_learns(moment.clock);
  return true;
}

void synchronize_stream(Queue& queue) { wait_on_host(moment_of(queue)); }

void synchronize_device() {
  std::vector<Queue*> all;
  {
    std::lock_guard<std::mutex> lock(g_queues_mutex);
    for (auto& [_, queue] : queues()) all.push_back(queue);
  }
  std::vector<Moment> moments;
  for (auto* queue : all) moments.push_back(moment_of(*queue));
  for (auto& moment : moments) moment.queue->demand(moment.number);
  for (auto& moment : moments) wait_on_host(moment);
}

void start_synchronizing(const std::string& what) {
  if (t_on_stream) return;
  count("waits: " + what);
  if (state().sync_mode == 2) TORCH_CHECK(false, "called a synchronizing CUDA operation (", what, ")");
  if (state().sync_mode == 1) TORCH_WARN("called a synchronizing CUDA operation (", what, ")");
}

}  // namespace sim
