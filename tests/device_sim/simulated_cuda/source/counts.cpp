#include "counts.h"

#include <mutex>

namespace sim {
static std::mutex g_counts_mutex;
static std::map<std::string, int64_t>& counted() { static auto* one = new std::map<std::string, int64_t>; return *one; }

void count(const std::string& what) { std::lock_guard<std::mutex> lock(g_counts_mutex); counted()[what]++; }
std::map<std::string, int64_t> counts() { std::lock_guard<std::mutex> lock(g_counts_mutex); return counted(); }
void reset_counts() { std::lock_guard<std::mutex> lock(g_counts_mutex); counted().clear(); }
}  // namespace sim
