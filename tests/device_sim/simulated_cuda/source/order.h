// What is known to have happened before what: a vector clock for the host and for each stream, and who has used which bytes.
//
// All threads of the host share one clock. They hand work to each other through locks of Python that nothing here sees, so a race between two
// threads of the host is not looked for.
#pragma once
#include <cstdint>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace sim {

using Actor = int;
constexpr Actor HOST = 0;
Actor new_actor();

// For each actor, up to which of its operations everything is known to be done.
class Clock {
 public:
  void join(const Clock& other);
  int64_t tick(Actor actor);
  bool knows(Actor actor, int64_t tick) const { return static_cast<size_t>(actor) < seen_.size() && seen_[actor] >= tick; }

 private:
  std::vector<int64_t> seen_;
};

using Place = const std::string*;
// Where the calling thread is in Python, with what it does there: "aten::mul at file.py:12, from train.py:3".
Place here(const std::string& what);

struct Access {
  Actor actor;
  int64_t tick;
  bool write;
  size_t begin, end;
  Place place;
};

// A block of device memory, or of pinned memory. Work that is queued keeps it alive, as a device does that no one asks.
struct Memory {
  Memory(size_t bytes, bool pinned);
  ~Memory();
  char* data;
  const size_t bytes;
  const bool pinned;
  int device = 0;
  Actor owner = HOST;         // the stream that it was allocated on
  std::set<Actor> recorded;   // record_stream: it is not given away before these are done with it
  std::vector<Access> accesses;
  Place freed = nullptr;
};
using MemoryP = std::shared_ptr<Memory>;

// Some bytes of a block, hull of a strided tensor, and what is done to them.
struct Use {
  MemoryP memory;
  size_t begin, end;
  bool write;
};

// Guards every clock and every list of accesses.
std::mutex& order_mutex();
Clock& host_clock();

// All of these take the mutex, and raise an error that names both places where two accesses have no order.
void check_launch(Clock& stream, Actor actor, const std::vector<Use>& uses, Place place);
void check_host(const std::vector<Use>& uses, Place place);
void check_reuse(const Clock& stream, const std::vector<MemoryP>& given_away, Place place);
void host_learns(const Clock& clock);

std::vector<std::string> races();

}  // namespace sim
