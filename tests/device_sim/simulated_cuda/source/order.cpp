#include "order.h"

#include <Python.h>
#include <c10/core/impl/alloc_cpu.h>
#include <c10/util/Exception.h>
#include <frameobject.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <unordered_set>

namespace sim {

// None of these is destroyed: streams work on while the interpreter ends.
std::mutex& order_mutex() { static auto* one = new std::mutex; return *one; }
Clock& host_clock() { static auto* one = new Clock; return *one; }
static std::vector<std::string>& found() { static auto* one = new std::vector<std::string>; return *one; }

Actor new_actor() {
  static std::atomic<int> last{HOST};
  return ++last;
}

void Clock::join(const Clock& other) {
  if (seen_.size() < other.seen_.size()) seen_.resize(other.seen_.size());
  for (size_t i = 0; i < other.seen_.size(); i++) seen_[i] = std::max(seen_[i], other.seen_[i]);
}

int64_t Clock::tick(Actor actor) {
  if (seen_.size() <= static_cast<size_t>(actor)) seen_.resize(actor + 1);
  return ++seen_[actor];
}

Memory::Memory(size_t bytes, bool pinned) : data(static_cast<char*>(c10::alloc_cpu(bytes))), bytes(bytes), pinned(pinned) {
  std::memset(data, 0xFF, bytes);  // NaN: what nobody has written is noticed
}
Memory::~Memory() { c10::free_cpu(data); }

static Place interned(std::string text) {
  static auto* mutex = new std::mutex;
  static auto* texts = new std::unordered_set<std::string>;
  std::lock_guard<std::mutex> lock(*mutex);
  return &*texts->insert(std::move(text)).first;
}

// The last frame inside torch or DeepSpeed, where engines wait, and the last one outside.
Place here(const std::string& what) {
  std::string inside, outside;
  if (Py_IsInitialized() && PyGILState_GetThisThreadState()) {  // torch calls its operators without the GIL
    auto gil = PyGILState_Ensure();
    PyFrameObject* frame = PyEval_GetFrame();
    Py_XINCREF(frame);
    while (frame && outside.empty()) {
      PyCodeObject* code = PyFrame_GetCode(frame);
      const char* file = PyUnicode_AsUTF8(code->co_filename);
      std::string path = file ? file : "?";
      auto packages = path.rfind("site-packages/");
      bool engine = packages != std::string::npos;
      auto name = engine ? path.substr(packages + 14) : path;
      if (engine ? inside.empty() : path.find("simulated_cuda/") == std::string::npos)
        (engine ? inside : outside) = name + ":" + std::to_string(PyFrame_GetLineNumber(frame));
      Py_DECREF(code);
      PyFrameObject* caller = PyFrame_GetBack(frame);
      Py_DECREF(frame);
      frame = caller;
    }
    Py_XDECREF(frame);
    PyGILState_Release(gil);
  }
  if (inside.empty() && outside.empty()) return interned(what + " (in a thread of torch, as that of backward)");
  return interned(what + " at " + inside + (inside.empty() || outside.empty() ? "" : ", from ") + outside);
}

[[noreturn]] static void race(const std::string& text) {
  found().push_back(text);
  if (const char* path = std::getenv("DEVICE_SIM_RACES"))  // an engine may hide the error, and a rank is a process of its own
    if (auto* file = std::fopen(path, "a")) {
      std::fprintf(file, "%s\n", text.c_str());
      std::fclose(file);
    }
  TORCH_CHECK(false, "race on the simulated device: ", text);
}

static std::string verb(bool write) { return write ? "writes" : "reads"; }

static void check(const Use& use, const Clock& clock, Place place) {
  for (const auto& past : use.memory->accesses) {
    if ((!past.write && !use.write) || past.end <= use.begin || use.end <= past.begin || clock.knows(past.actor, past.tick)) continue;
    race(*place + " " + verb(use.write) + (use.memory->pinned ? " pinned memory" : " memory") + " without a wait for " + *past.place + ", which " +
         verb(past.write) + " it on another stream");
  }
}

static void remember(const Use& use, Actor actor, int64_t tick, Place place) {
  auto& all = use.memory->accesses;
  // Everything that it covers and has waited for is in its past; so are older uses of the same kind by the same stream.
  all.erase(std::remove_if(all.begin(), all.end(), [&](const Access& past) {
    bool covered = use.begin <= past.begin && past.end <= use.end;
    return covered && (use.write || (!past.write && past.actor == actor));
  }), all.end());
  all.push_back({actor, tick, use.write, use.begin, use.end, place});
}

void check_launch(Clock& stream, Actor actor, const std::vector<Use>& uses, Place place) {
  std::lock_guard<std::mutex> lock(order_mutex());
  stream.join(host_clock());
  for (const auto& use : uses) check(use, stream, place);
  auto tick = stream.tick(actor);
  for (const auto& use : uses) remember(use, actor, tick, place);
}

// What the host does is before whatever it launches later, so it needs no record.
void check_host(const std::vector<Use>& uses, Place place) {
  std::lock_guard<std::mutex> lock(order_mutex());
  for (const auto& use : uses) check(use, host_clock(), place);
}

// The caching allocator knows the order of the stream of an allocation, and of those that `record_stream` named; of no other.
void check_reuse(const Clock& stream, const std::vector<MemoryP>& given_away, Place place) {
  std::lock_guard<std::mutex> lock(order_mutex());
  Clock known = stream;
  known.join(host_clock());
  for (const auto& memory : given_away)
    for (const auto& past : memory->accesses) {
      if (past.actor == memory->owner || memory->recorded.count(past.actor) || known.knows(past.actor, past.tick)) continue;
      race("memory that is freed by " + *memory->freed + " may be given to " + *place + " while " + *past.place + " still " + verb(past.write) +
           " it on another stream; it needs record_stream, or a wait before it is freed");
    }
}

void host_learns(const Clock& clock) {
  std::lock_guard<std::mutex> lock(order_mutex());
  host_clock().join(clock);
}

std::vector<std::string> races() {
  std::lock_guard<std::mutex> lock(order_mutex());
  return found();
}

}  // namespace sim
