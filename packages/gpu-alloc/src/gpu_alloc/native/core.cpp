// The policy of core/ once more, for speed and for callers that may not wait for Python.
//
// Integers and function pointers only: no CUDA headers, no torch, no Python. Memory comes through
// two function pointers in the shape of cudaMalloc and cudaFree, or as address space with two more
// that map and unmap pages; events through others in the shape of CUDA's. Decisions are those of core/*.py, address by address; tests hold both together.
//
// Locks: `mutex` is held while memory is placed and around calls of the source, as the lock of
// core/allocator.py is. `table` guards the live pointers and the queue of frees for a few
// instructions, so that a free never waits. A thread that comes back from a callback of the source
// is told so (REENTRANT) instead of waiting for itself.
#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <set>
#include <thread>
#include <unordered_map>
#include <vector>

using i64 = int64_t;

namespace {

constexpr i64 NONE = INT64_MIN;  // a stream that is none
constexpr size_t KEPT_LISTS = 8;
constexpr i64 FIRST_ADDRESS = i64(1) << 40;
constexpr i64 MOST_BYTES = i64(1) << 60;  // beyond any device
constexpr i64 PAGE = i64(1) << 21;  // of physical memory
enum Result : i64 { NO_ROOM = 0, CLOSED = -1, REENTRANT = -2, NO_MEMORY = -3 };

i64 round_up(i64 size, i64 multiple) { return (size + multiple - 1) / multiple * multiple; }

struct Chunk;

struct Block {
  Block(i64 ptr, i64 size, Chunk* chunk, i64 stream)
      : ptr(ptr), size(size), chunk(chunk), stream(stream) {}
  i64 ptr, size;
  Chunk* chunk;
  i64 stream;  // NONE until a stream uses it
  bool is_free = true;
  Block *prev = nullptr, *next = nullptr;
  i64 requested = 0, serial = 0;
  i64 recorded = 0;  // the number of the trace that has it
  std::vector<i64> users;  // other streams that use it, sorted
};

struct Chunk {
  i64 ptr, size, number;
  int pool;
  bool pre_allocated;
  i64 reserved;  // bytes with memory behind them
  i64 num_live = 0;
  Block* first = nullptr;
  std::vector<char> mapped = {};  // of each page, where pages are mapped
};

// Keeps the last `size` bytes of a block in a new one.
Block* split(Block* block, i64 size) {
  auto* tail = new Block(block->ptr + block->size - size, size, block->chunk, block->stream);
  block->size -= size;
  tail->prev = block;
  tail->next = block->next;
  if (tail->next) tail->next->prev = tail;
  block->next = tail;
  return tail;
}

void absorb_next(Block* block) {
  Block* absorbed = block->next;
  block->size += absorbed->size;
  block->next = absorbed->next;
  if (block->next) block->next->prev = block;
  delete absorbed;
}

// A free block, or one together with the unused memory before it.
struct Place {
  i64 size, number, offset;
  Block* block;
  bool operator<(const Place& o) const {
    if (size != o.size) return size < o.size;
    if (number != o.number) return number < o.number;
    return offset < o.offset;
  }
};

// core/free_list.py: 32 bins per power of two, a bit for each that is not empty, order inside.
class FreeList {
 public:
  i64 total_bytes = 0, count = 0;

  void add(const Place& place) {
    int i = index_of(place.size);
    if (!bins_[i]) bins_[i] = std::make_unique<std::set<Place>>();
    if (spare_) {
      spare_.value() = place;
      bins_[i]->insert(std::move(spare_));
    } else {
      bins_[i]->insert(place);
    }
    words_[i >> 6] |= uint64_t(1) << (i & 63);
    summary_ |= uint64_t(1) << (i >> 6);
    total_bytes += place.size;
    count++;
  }

  void remove(const Place& place) {
    int i = index_of(place.size);
    spare_ = bins_[i]->extract(place);
    if (bins_[i]->empty()) {
      words_[i >> 6] &= ~(uint64_t(1) << (i & 63));
      if (!words_[i >> 6]) summary_ &= ~(uint64_t(1) << (i >> 6));
    }
    total_bytes -= place.size;
    count--;
  }

  // The smallest place of at least `size`; of equals the one in the oldest chunk, then the lowest.
  const Place* find(i64 size) const {
    int i = index_of(size);
    if (words_[i >> 6] >> (i & 63) & 1) {
      auto found = bins_[i]->lower_bound(Place{size, INT64_MIN, INT64_MIN, nullptr});
      if (found != bins_[i]->end()) return &*found;
    }
    i++;
    uint64_t above = words_[i >> 6] & ~uint64_t(0) << (i & 63);
    int word = i >> 6;
    if (!above) {
      uint64_t words = word == 63 ? 0 : summary_ & ~uint64_t(0) << (word + 1);
      if (!words) return nullptr;
      word = __builtin_ctzll(words);
      above = words_[word];
    }
    return &*bins_[(word << 6) + __builtin_ctzll(above)]->begin();
  }

  i64 largest_bytes() const {
    if (!summary_) return 0;
    int word = 63 - __builtin_clzll(summary_);
    return bins_[(word << 6) + 63 - __builtin_clzll(words_[word])]->rbegin()->size;
  }

  template <typename F>
  void each(F action) const {
    for (const auto& bin : bins_)
      if (bin)
        for (const Place& place : *bin) action(place);
  }

 private:
  static int index_of(i64 size) {
    int shift = 58 - __builtin_clzll(uint64_t(size));
    return shift <= 0 ? int(size) : (shift << 5) + int(size >> shift);
  }

  std::unique_ptr<std::set<Place>> bins_[2048];
  std::set<Place>::node_type spare_;  // what `remove` took out: most often `add` follows
  uint64_t words_[33] = {};
  uint64_t summary_ = 0;
};

// core/planned.py: a chunk that is cut as a plan says. A plan is three numbers a row: size, stream,
// offset of a place, or 0, stream and first byte of a stream's part, by rising address.
struct Planned {
  struct Places {
    std::vector<i64> offsets;
    size_t next = 0;
  };
  Chunk* chunk;
  std::map<i64, Block*> blocks;  // by address
  std::map<std::pair<i64, i64>, Places> places;  // by size and stream

  Planned(Chunk* chunk, const std::vector<i64>& rows) : chunk(chunk) {
    Block* block = chunk->first;
    for (size_t i = 0; i < rows.size(); i += 3) {
      if (rows[i]) {
        places[{rows[i], rows[i + 1]}].offsets.push_back(rows[i + 2]);
        continue;
      }
      if (rows[i + 2]) block = split(block, chunk->size - rows[i + 2]);
      block->stream = rows[i + 1];
      blocks[block->ptr] = block;
    }
  }

  void begin() {
    for (auto& each : places) each.second.next = 0;
  }

  void advance(i64 size, i64 stream) {
    auto found = places.find({size, stream});
    if (found != places.end()) found->second.next++;
  }

  // Where the next such request goes, if the plan has one and the place is free; 0 otherwise.
  i64 find(i64 size, i64 stream) const {
    auto found = places.find({size, stream});
    if (found == places.end() || found->second.next >= found->second.offsets.size()) return 0;
    i64 ptr = chunk->ptr + found->second.offsets[found->second.next];
    Block* block = std::prev(blocks.upper_bound(ptr))->second;
    return block->is_free && ptr + size <= block->ptr + block->size ? ptr : 0;
  }

  Block* take(i64 size, i64 stream) {
    i64 ptr = find(size, stream);
    return ptr ? cut(ptr, size) : nullptr;
  }

  Block* take_gap(i64 size, i64 stream) {
    Block* best = nullptr;
    for (auto& [ptr, b] : blocks)
      if (b->is_free && b->stream == stream && b->size >= size && (!best || b->size < best->size))
        best = b;
    return best ? cut(best->ptr, size) : nullptr;
  }

  void put_back(Block* block) {
    block->is_free = true;
    block->requested = 0;
    chunk->num_live--;
    if (joins(block, block->next)) absorb_next(block);
    if (joins(block->prev, block)) absorb_next(block->prev);
  }

 private:
  static bool joins(Block* first, Block* second) {
    return first && second && first->is_free && second->is_free && first->stream == second->stream;
  }

  Block* cut(i64 ptr, i64 size) {
    Block* found = std::prev(blocks.upper_bound(ptr))->second;
    i64 end = found->ptr + found->size;
    if (ptr + size < end) {
      Block* tail = split(found, end - ptr - size);
      blocks[tail->ptr] = tail;
    }
    if (found->ptr < ptr) {
      found = split(found, size);
      blocks[found->ptr] = found;
    }
    found->is_free = false;
    chunk->num_live++;
    return found;
  }

  void absorb_next(Block* block) {
    blocks.erase(block->next->ptr);
    ::absorb_next(block);
  }
};

struct Counters {
  i64 live = 0, allocated = 0, requested = 0, reserved = 0;
  i64 allocated_peak = 0, requested_peak = 0, reserved_peak = 0;
};

// core/pool.py
struct Pool {
  int index = 0;
  i64 chunk_bytes = 0;
  Counters counters;
  std::map<i64, Chunk*> chunks;  // by number: the oldest first
  std::unique_ptr<Planned> planned;  // one of the chunks, which free lists leave out
  std::unordered_map<i64, std::unique_ptr<FreeList>> places;
  std::map<i64, std::unique_ptr<FreeList>> unused;  // under NONE those that join with no block

  Pool() { unused[NONE] = std::make_unique<FreeList>(); }

  void add_chunk(i64 ptr, i64 size, bool pre_allocated, i64 number, bool is_paged,
                 const std::vector<i64>& plan) {
    auto* chunk = new Chunk{ptr, size, number, index, pre_allocated, 0};
    if (is_paged) chunk->mapped.resize(size_t(size / PAGE));
    chunk->first = new Block(ptr, size, chunk, NONE);
    chunks[number] = chunk;
    if (plan.empty()) add_unused(NONE, chunk->first);
    else planned = std::make_unique<Planned>(chunk, plan);
    count_reserved(chunk, is_paged ? 0 : size);
  }

  void count_reserved(Chunk* chunk, i64 bytes) {
    chunk->reserved += bytes;
    counters.reserved += bytes;
    if (counters.reserved > counters.reserved_peak) counters.reserved_peak = counters.reserved;
  }

  void remove_chunk(Chunk* chunk) {
    if (planned && chunk == planned->chunk) {
      planned.reset();
    } else {
      for (Block* b = chunk->first; b; b = b->next) pull(b);
      if (chunk->first->stream == NONE) remove_unused(NONE, chunk->first);
    }
    chunks.erase(chunk->number);
    counters.reserved -= chunk->reserved;
    forget(chunk);
  }

  static void forget(Chunk* chunk) {
    for (Block* b = chunk->first; b;) {
      Block* next = b->next;
      delete b;
      b = next;
    }
    delete chunk;
  }

  // The smallest place of at least `size` that `stream` may have; null when there is none.
  const Place* find(i64 size, i64 stream) const {
    const Place* best = nullptr;
    auto own = places.find(stream);
    if (own != places.end()) best = own->second->find(size);
    for (auto& [owner, list] : unused) {
      if (owner == stream || !list->count) continue;
      const Place* other = list->find(size);
      if (other && (!best || *other < *best)) best = other;
    }
    return best;
  }

  Block* take(i64 size, i64 stream) {
    const Place* best = find(size, stream);
    if (!best) return nullptr;
    Block* found = best->block;
    Block* block = found->stream == NONE ? cut_unused(found, size, stream) : cut_place(found, size);
    block->is_free = false;
    block->chunk->num_live++;
    return block;
  }

  void count_use(Block* block, i64 requested) {
    block->requested = requested;
    counters.live++;
    counters.allocated += block->size;
    counters.requested += requested;
    if (counters.allocated > counters.allocated_peak) counters.allocated_peak = counters.allocated;
    if (counters.requested > counters.requested_peak) counters.requested_peak = counters.requested;
  }

  void give(Block* block) {
    counters.live--;
    counters.allocated -= block->size;
    counters.requested -= block->requested;
    put_back(block);
  }

  // `give` of a block that was not counted yet.
  void put_back(Block* block) {
    if (planned && block->chunk == planned->chunk) return planned->put_back(block);
    block->is_free = true;
    block->requested = 0;
    block->chunk->num_live--;
    if (Block* after = block->next; after && after->is_free && after->stream == block->stream) {
      pull(after);
      absorb_next(block);
    }
    if (Block* before = block->prev; before && before->is_free && before->stream == block->stream) {
      pull(before);
      absorb_next(before);
      block = before;
    }
    put(block);
  }

  std::vector<Chunk*> idle_chunks(bool include_pre_allocated, i64 stream) const {
    std::vector<Chunk*> found;
    for (auto& [number, chunk] : chunks) {
      bool fits = !chunk->num_live && (include_pre_allocated || !chunk->pre_allocated);
      for (Block* b = chunk->first; fits && stream != NONE && b; b = b->next)
        fits = b->stream == stream || b->stream == NONE;
      if (fits) found.push_back(chunk);
    }
    return found;
  }

  template <typename F>
  void each_free_for(i64 stream, F action) const {
    auto own = places.find(stream);
    if (own != places.end()) action(*own->second);
    for (auto& [owner, list] : unused)
      if (owner != stream) action(*list);
  }

 private:
  static Place place_of(Block* start, i64 size, Block* block) {
    Chunk* chunk = start->chunk;
    return Place{size, chunk->number, start->ptr - chunk->ptr, block};
  }

  static bool has_unused_before(Block* block) { return block->prev && block->prev->stream == NONE; }

  void put(Block* block) {
    if (block->stream == NONE) return;
    auto& list = places[block->stream];
    if (!list) list = std::make_unique<FreeList>();
    if (!has_unused_before(block)) {
      list->add(place_of(block, block->size, block));
      return;
    }
    Block* before = block->prev;
    list->add(place_of(before, before->size + block->size, block));
    auto& joined = unused[block->stream];
    if (!joined) joined = std::make_unique<FreeList>();
    remove_unused(NONE, before);
    add_unused(block->stream, before);
  }

  void pull(Block* block) {
    if (block->stream == NONE) return;
    FreeList& list = *places[block->stream];
    if (!has_unused_before(block)) {
      list.remove(place_of(block, block->size, block));
      return;
    }
    Block* before = block->prev;
    list.remove(place_of(before, before->size + block->size, block));
    remove_unused(block->stream, before);
    add_unused(NONE, before);
    if (unused.size() > KEPT_LISTS && !unused[block->stream]->count) unused.erase(block->stream);
  }

  void add_unused(i64 stream, Block* b) { unused[stream]->add(place_of(b, b->size, b)); }
  void remove_unused(i64 stream, Block* b) { unused[stream]->remove(place_of(b, b->size, b)); }

  Block* cut_place(Block* block, i64 size) {
    pull(block);
    if (block->size > size) {
      Block* tail = split(block, size);
      put(block);
      return tail;
    }
    if (block->size == size) return block;
    Block* before = block->prev;
    remove_unused(NONE, before);
    i64 missing = size - block->size;
    block->ptr -= missing;
    block->size = size;
    before->size -= missing;
    if (before->size) {
      add_unused(NONE, before);
    } else {
      block->prev = nullptr;
      block->chunk->first = block;
      delete before;
    }
    return block;
  }

  Block* cut_unused(Block* before, i64 size, i64 stream) {
    Block* after = before->next;
    bool joined = after && after->is_free;
    if (joined) pull(after);
    remove_unused(NONE, before);
    Block* block = before;
    if (before->size > size) {
      block = split(before, size);
      add_unused(NONE, before);
    }
    block->stream = stream;
    block->is_free = false;
    if (joined) put(after);
    return block;
  }
};

// The order of settings in `ga_open`; native/binding.py has the same.
enum Setting {
  ALIGNMENT, SMALL_LIMIT, SMALL_CHUNK, LARGE_CHUNK, SMALL_PRE_ALLOC, LARGE_PRE_ALLOC,
  FREE_IDLE, FREE_WHEN_NO_HIT, LIMIT, GRANULARITY, CAPACITY,
  RANGE,  // above 0: chunks are so much address space, and pages are mapped
  NUM_SETTINGS
};

struct Functions {  // null: there are none; without `acquire` addresses are invented
  int (*acquire)(void**, size_t);
  int (*release)(void*);
  int (*event_create)(void**, unsigned);
  int (*event_record)(void*, void*);
  int (*event_query)(void*);
  int (*event_wait)(void*);
  int (*event_destroy)(void*);
  int (*is_capturing)(void*, int*);
  int (*device_wait)();
  int (*forget_error)();  // what a call that failed leaves behind, for the next one to find
  int (*get_device)(int*);  // these three are called for a core with a `device`
  int (*set_device)(int);
  int (*exchange_capture_mode)(int*);
  int (*map)(void*, size_t);
  int (*unmap)(void*, size_t);
};

constexpr unsigned EVENT_WITHOUT_TIMING = 2;
constexpr int CAPTURE_RELAXED = 2;
constexpr size_t NUM_STATS = 33;

struct Waiting {
  Block* block;
  std::vector<void*> events;
};

class Core {
 public:
  Core(const i64* settings, const Functions& functions) : fns(functions) {
    std::memcpy(set, settings, sizeof set);
    pools[0].index = 0;
    pools[1].index = 1;
    pools[0].chunk_bytes = set[SMALL_CHUNK];
    pools[1].chunk_bytes = set[LARGE_CHUNK];
    limit_bytes = set[LIMIT];
  }

  ~Core() {
    for (Pool& pool : pools)
      for (auto& [number, chunk] : pool.chunks) Pool::forget(chunk);
  }

  i64 set[NUM_SETTINGS];
  Functions fns;
  int device = -1;  // whose memory this is; -1: the functions see to it
  Pool pools[2];
  i64 limit_bytes, num_source_calls = 0, num_chunks = 0;
  i64 reserved_peak = 0, allocated_peak = 0, requested_peak = 0;
  i64 num_mallocs = 0, num_frees = 0, malloced_bytes = 0, freed_bytes = 0, num_retries = 0, num_ooms = 0;
  i64 serial = 0, used_bytes = 0, next_address = FIRST_ADDRESS;
  i64 num_planned = 0, num_unplanned = 0;
  bool closed = false, recording = false;
  i64 num_traces = 0;
  std::vector<i64> events;  // of the trace, 6 numbers each
  std::deque<Block*> unrecorded;
  std::deque<Waiting> waiting;
  std::vector<i64> failure;  // of the request that failed last: bytes, stream, limit, ga_stats

  std::mutex mutex, table;
  std::atomic<std::thread::id> owner{};
  std::unordered_map<i64, Block*> live;
  std::vector<Block*> pending, draining;
  std::atomic<bool> has_pending{false};

  // 0, or which pool's pre-allocation had no room: 1 small, 2 large.
  int pre_allocate() {
    if (set[RANGE]) return 0;
    for (int i = 0; i < 2; i++) {
      i64 size = round_up(set[i ? LARGE_PRE_ALLOC : SMALL_PRE_ALLOC], set[GRANULARITY]);
      if (size && !grow(pools[i], size, true)) return i + 1;
    }
    return 0;
  }

  Block* take(i64 requested, i64 stream, bool last_resort) {
    i64 size = padded(requested);
    bool follows = pools[1].planned != nullptr;
    Block* block = follows ? backed(pools[1].planned->take(size, stream)) : nullptr;
    bool is_planned = block;
    if (!block) {
      Pool& pool = home(size);
      block = pool.take(size, stream);
      if (!block) block = find_room(pool, size, stream, last_resort);
      block = backed(block);
    }
    if (block && follows) advance(size, stream, is_planned);
    if (block) count_use(block, requested);
    return block;
  }

  void advance(i64 size, i64 stream, bool is_planned) {
    if (pools[1].planned) pools[1].planned->advance(size, stream);
    (is_planned ? num_planned : num_unplanned)++;
  }

  // 0, or how many blocks of the plan before are in use, or NO_MEMORY for the range of this one.
  i64 follow(const std::vector<i64>& plan, i64 size) {
    if (pools[1].planned) {
      Chunk* chunk = pools[1].planned->chunk;
      if (chunk->num_live) return chunk->num_live;
      release(pools[1], chunk);
    }
    num_planned = num_unplanned = 0;
    if (plan.empty()) return 0;
    size = round_up(size, set[GRANULARITY]);
    for (;;) {
      if (grow(pools[1], size, true, plan)) return 0;
      release_idle(false, NONE);
      if (grow(pools[1], size, true, plan)) return 0;
      if (!has_pending.load(std::memory_order_relaxed)) return NO_MEMORY;
      drain();  // freed by finalizers inside of it
    }
  }

  void begin_step() {
    if (pools[1].planned) pools[1].planned->begin();
  }

  void count_use(Block* block, i64 requested) {
    pools[block->chunk->pool].count_use(block, requested);
    i64 allocated = pools[0].counters.allocated + pools[1].counters.allocated;
    if (allocated > allocated_peak) allocated_peak = allocated;
    i64 total = pools[0].counters.requested + pools[1].counters.requested;
    if (total > requested_peak) requested_peak = total;
  }

  // Takes a block, counts and lists it. The mutex is held.
  i64 place(i64 requested, i64 stream, bool last_resort) {
    if (has_pending.load(std::memory_order_relaxed) || has_deferred()) drain();
    return hand_out(take(requested, stream, last_resort));
  }

  // The same, if the source need not be asked for anything.
  i64 place_from_lists(i64 requested, i64 stream) {
    if (closed || has_deferred()) return NO_ROOM;
    if (has_pending.load(std::memory_order_relaxed)) {
      if (set[FREE_IDLE]) return NO_ROOM;
      drain();
    }
    Pool& pool = home(padded(requested));
    i64 size = padded(requested);
    Planned* planned = pools[1].planned.get();
    if (i64 ptr = planned ? planned->find(size, stream) : 0) {
      i64 start = ptr - planned->chunk->ptr;
      if (set[RANGE] && num_missing(planned->chunk, start, start + size)) return NO_ROOM;
      Block* block = planned->take(size, stream);
      advance(size, stream, true);
      count_use(block, requested);
      return hand_out(block);
    }
    if (set[RANGE]) {
      const Place* place = pool.find(size, stream);
      if (!place) return NO_ROOM;
      i64 end = place->offset + place->size;  // where the block is cut
      if (num_missing(place->block->chunk, end - size, end)) return NO_ROOM;
    }
    Block* block = pool.take(size, stream);
    if (block && planned) advance(size, stream, false);
    if (block) count_use(block, requested);
    return hand_out(block);
  }

  i64 hand_out(Block* block) {
    if (!block) return NO_ROOM;
    block->serial = ++serial;
    num_mallocs++;
    malloced_bytes += block->size;
    if (recording) record_malloc(block);
    std::lock_guard<std::mutex> guard(table);
    live.emplace(block->ptr, block);
    return block->ptr;
  }

  i64 release_idle(bool include_pre_allocated, i64 stream) {
    i64 released = 0;
    if (set[RANGE]) return release_pages(include_pre_allocated, stream);
    for (Pool& pool : pools)
      for (Chunk* chunk : pool.idle_chunks(include_pre_allocated, stream)) {
        released += chunk->size;
        release(pool, chunk);
      }
    return released;
  }

  void drain() {
    do {
      while (has_pending.load(std::memory_order_relaxed)) {
        draining.clear();
        {
          std::lock_guard<std::mutex> guard(table);
          draining.swap(pending);
          has_pending.store(false, std::memory_order_relaxed);
        }
        for (Block* block : draining) {
          if (!block->users.empty() && fns.event_record) unrecorded.push_back(block);
          else give(block);
        }
      }
      if (has_deferred()) reap(false, false);
    } while (has_pending.load(std::memory_order_relaxed));  // freed while a chunk was given back
  }

  // core/deferred.py: give back what no other stream uses any more.
  void reap(bool everything, bool wait) {
    if (!has_deferred()) return;
    Calling calling(*this);
    for (Block* block : unrecorded)
      if (captures(block)) return;
    for (; !unrecorded.empty(); unrecorded.pop_front()) {
      Waiting item{unrecorded.front(), {}};
      for (i64 stream : item.block->users)
        if (!record(stream, item.events)) {  // the block stays, and is in use for all that is known
          for (void* event : item.events) fns.event_destroy(event);
          return;
        }
      waiting.push_back(std::move(item));
    }
    for (Waiting& item : waiting)
      if (captures(item.block)) return;
    for (size_t left = waiting.size(); left; left--) {
      Waiting item = std::move(waiting.front());
      waiting.pop_front();
      bool done = true;
      for (void* event : item.events) {
        done = !failed(wait ? fns.event_wait(event) : fns.event_query(event));
        if (!done) break;
      }
      if (done) {
        for (void* event : item.events) fns.event_destroy(event);
        give(item.block);
      } else if (everything) {
        waiting.push_back(std::move(item));
      } else {
        waiting.push_front(std::move(item));
        return;
      }
    }
  }

  i64 first_attempt(i64 size, i64 stream) {
    i64 ptr = place(size, stream, false);
    if (ptr || !fns.event_record) return ptr;
    drain();
    reap(true, false);
    return place(size, stream, false);
  }

  i64 last_attempt(i64 size, i64 stream) {
    num_retries++;
    do {
      drain();
      reap(false, true);
      if (i64 ptr = place(size, stream, true)) return ptr;
    } while (has_pending.load(std::memory_order_relaxed));  // freed by finalizers inside of it
    num_ooms++;
    failure.assign({size, stream, limit_bytes});
    failure.resize(failure.size() + NUM_STATS);
    write_stats(stream, failure.data() + 3);
    if (recording) {  // taken and given back at once, so that a replay makes the request too
      note(0, ++serial, size, stream, -1, 0);
      note(1, serial, 0, stream, -1, 0);
    }
    return NO_ROOM;
  }

  void reset_peaks() {
    for (Pool& pool : pools) {
      Counters& c = pool.counters;
      c.allocated_peak = c.allocated;
      c.requested_peak = c.requested;
      c.reserved_peak = c.reserved;
    }
    reserved_peak = reserved();
    allocated_peak = pools[0].counters.allocated + pools[1].counters.allocated;
    requested_peak = pools[0].counters.requested + pools[1].counters.requested;
  }

  void write_stats(i64 stream, i64* out) const {
    i64 usable = 0, largest_usable = 0;
    for (const Pool& pool : pools) {
      const FreeList& nobodys = *pool.unused.at(NONE);
      i64 largest = nobodys.largest_bytes(), num_free = nobodys.count;
      for (auto& [owner, list] : pool.places) {
        if (list->largest_bytes() > largest) largest = list->largest_bytes();
        num_free += list->count;
      }
      pool.each_free_for(stream, [&](const FreeList& list) {
        usable += list.total_bytes;
        if (list.largest_bytes() > largest_usable) largest_usable = list.largest_bytes();
      });
      if (pool.planned)
        for (auto& [ptr, b] : pool.planned->blocks) {
          if (!b->is_free) continue;
          num_free++;
          if (b->size > largest) largest = b->size;
          if (b->stream != stream) continue;
          usable += b->size;
          if (b->size > largest_usable) largest_usable = b->size;
        }
      const Counters& c = pool.counters;
      if (set[RANGE] && largest > c.reserved - c.allocated) largest = c.reserved - c.allocated;
      for (i64 value : {c.allocated, c.allocated_peak, c.requested, c.requested_peak, c.reserved,
                        c.reserved_peak, largest, c.live, num_free, i64(pool.chunks.size())})
        *out++ = value;
    }
    if (set[RANGE]) {  // of addresses there are always enough
      i64 held = reserved() - pools[0].counters.allocated - pools[1].counters.allocated;
      if (usable > held) usable = held;
      if (largest_usable > usable) largest_usable = usable;
    }
    for (i64 value : {allocated_peak, requested_peak, reserved_peak, num_source_calls, num_mallocs,
                      num_frees, malloced_bytes, freed_bytes, num_retries, num_ooms, waiting_bytes(),
                      usable, largest_usable})
      *out++ = value;
  }

  std::vector<i64> snapshot() const {
    std::vector<i64> rows{i64(pools[0].chunks.size() + pools[1].chunks.size())};
    for (const Pool& pool : pools)
      for (auto& [number, chunk] : pool.chunks) {
        bool is_planned = pool.planned && chunk == pool.planned->chunk;
        rows.insert(rows.end(), {is_planned ? 2 : pool.index, chunk->ptr, chunk->size, chunk->pre_allocated, 0});
        size_t count_at = rows.size() - 1;
        for (Block* b = chunk->first; b; b = b->next, rows[count_at]++)
          rows.insert(rows.end(), {b->stream, b->ptr, b->size, b->requested, b->is_free});
      }
    for (const Pool& pool : pools) {
      auto write = [&](i64 stream, const FreeList& list) {
        list.each([&](const Place& p) {
          rows.insert(rows.end(), {pool.index, stream, p.block->chunk->ptr + p.offset, p.size});
        });
      };
      for (auto& [stream, list] : pool.places) write(stream, *list);
      for (auto& [stream, list] : pool.unused) write(NONE, *list);
      if (pool.planned)
        for (auto& [ptr, b] : pool.planned->blocks)
          if (b->is_free) rows.insert(rows.end(), {2, b->stream, b->ptr, b->size});
    }
    return rows;
  }

  void start_recording() {
    events.clear();
    recording = true;
    num_traces++;  // a block of the last one may still wait for an event
    std::map<i64, Block*> ordered;
    std::lock_guard<std::mutex> guard(table);
    for (auto& [ptr, block] : live) ordered[block->serial] = block;
    for (auto& [number, block] : ordered) record_malloc(block);
  }

  bool has_deferred() const { return !unrecorded.empty() || !waiting.empty(); }

  i64 waiting_bytes() const {
    i64 total = 0;
    for (Block* block : unrecorded) total += block->size;
    for (const Waiting& item : waiting) total += item.block->size;
    return total;
  }

  void record_malloc(Block* b) {
    b->recorded = num_traces;
    note(0, b->serial, b->requested, b->stream, b->chunk->number, b->ptr - b->chunk->ptr);
  }

  void note(i64 action, i64 id, i64 size, i64 stream, i64 chunk, i64 offset) {
    for (i64 value : {action, id, size, stream, chunk, offset}) events.push_back(value);
  }

  i64 padded(i64 size) const { return (size + set[ALIGNMENT] - 1) & ~(set[ALIGNMENT] - 1); }
  Pool& home(i64 size) { return pools[size > set[SMALL_LIMIT]]; }
  i64 reserved() const { return pools[0].counters.reserved + pools[1].counters.reserved; }

 private:
  // The order of core/policy.py, after the home pool's free list had nothing.
  Block* find_room(Pool& pool, i64 size, i64 stream, bool last_resort) {
    i64 exact = round_up(size, set[GRANULARITY]);
    if (set[RANGE]) {
      grow(pool, exact > set[RANGE] ? exact : set[RANGE], false);
      return pool.take(size, stream);
    }
    i64 chunk = round_up(pool.chunk_bytes, set[GRANULARITY]);
    if (chunk < exact) chunk = exact;
    if (set[FREE_WHEN_NO_HIT]) release_idle(false, NONE);
    if (grow(pool, chunk, false)) return pool.take(size, stream);
    bool released = release_idle(false, NONE) > 0;
    if ((released && grow(pool, chunk, false)) || grow(pool, exact, false))
      return pool.take(size, stream);
    Block* block = pools[1 - pool.index].take(size, stream);
    if (!block && pools[1].planned) block = pools[1].planned->take_gap(size, stream);
    if (!block && last_resort && release_idle(true, NONE)) {
      grow(pool, exact, false);
      block = pool.take(size, stream);
    }
    return block;
  }

  bool grow(Pool& pool, i64 size, bool pre_allocated, const std::vector<i64>& plan = {}) {
    bool is_paged = set[RANGE] > 0;
    i64 total = reserved() + (is_paged ? 0 : size);
    if (!is_paged && limit_bytes && total > limit_bytes) return false;
    num_source_calls++;
    i64 ptr = acquire(size);
    if (!ptr) return false;
    pool.add_chunk(ptr, size, pre_allocated, num_chunks++, is_paged, plan);
    if (total > reserved_peak) reserved_peak = total;
    return true;
  }

  i64 acquire(i64 size) {
    if (fns.acquire) {
      Calling calling(*this);
      void* ptr = nullptr;
      return failed(fns.acquire(&ptr, size_t(size))) ? 0 : i64(intptr_t(ptr));
    }
    bool counts = !set[RANGE];
    if (counts && set[CAPACITY] >= 0 && used_bytes + size > set[CAPACITY]) return 0;
    i64 ptr = next_address;
    i64 alignment = set[GRANULARITY] > PAGE ? set[GRANULARITY] : PAGE;
    next_address += round_up(size, alignment);
    if (counts) used_bytes += size;
    return ptr;
  }

  // core/pages.py: pages, and runs of them, are counted from the start of their chunk.
  static i64 pages_to(i64 offset) { return (offset + PAGE - 1) / PAGE; }

  // How many of the pages that hold bytes from `start` to `end` of a chunk are not mapped.
  static i64 num_missing(const Chunk* chunk, i64 start, i64 end) {
    auto first = chunk->mapped.begin();
    return std::count(first + start / PAGE, first + pages_to(end), char(0));
  }

  // Calls `action` with each longest run of pages that are mapped, or are not; stops when told.
  template <typename F>
  static bool each_run(const Chunk* chunk, bool mapped, i64 page, i64 end, F action) {
    while (page < end) {
      if (bool(chunk->mapped[size_t(page)]) != mapped) {
        page++;
        continue;
      }
      i64 stop = page;
      while (stop < end && bool(chunk->mapped[size_t(stop)]) == mapped) stop++;
      if (!action(page, stop)) return false;
      page = stop;
    }
    return true;
  }

  bool map_pages(Chunk* chunk, i64 first, i64 end) {
    num_source_calls++;
    i64 size = (end - first) * PAGE;
    if (fns.map) {
      void* ptr = reinterpret_cast<void*>(intptr_t(chunk->ptr + first * PAGE));
      if (failed(fns.map(ptr, size_t(size)))) return false;
    } else {
      if (set[CAPACITY] >= 0 && used_bytes + size > set[CAPACITY]) return false;
      used_bytes += size;
    }
    std::fill(chunk->mapped.begin() + first, chunk->mapped.begin() + end, char(1));
    return true;
  }

  void unmap_pages(Chunk* chunk, i64 first, i64 end) {
    num_source_calls++;
    i64 size = (end - first) * PAGE;
    if (fns.unmap) fns.unmap(reinterpret_cast<void*>(intptr_t(chunk->ptr + first * PAGE)), size_t(size));
    else used_bytes -= size;
    std::fill(chunk->mapped.begin() + first, chunk->mapped.begin() + end, char(0));
  }

  // Maps what is missing under a block, or nothing of it.
  bool map_under(Block* block) {
    std::vector<std::pair<i64, i64>> done;
    i64 start = block->ptr - block->chunk->ptr, stop = pages_to(start + block->size);
    bool all = each_run(block->chunk, false, start / PAGE, stop, [&](i64 a, i64 b) {
      if (!map_pages(block->chunk, a, b)) return false;
      done.push_back({a, b});
      return true;
    });
    if (!all)
      for (auto& [first, end] : done) unmap_pages(block->chunk, first, end);
    return all;
  }

  i64 unmap_free(Chunk* chunk, i64 stream) {
    i64 pages = 0;
    auto unmap_between = [&](i64 start, i64 stop) {
      i64 first = pages_to(start - chunk->ptr), end = (stop - chunk->ptr) / PAGE;
      each_run(chunk, true, first, end, [&](i64 a, i64 b) {
        unmap_pages(chunk, a, b);
        pages += b - a;
        return true;
      });
    };
    i64 start = -1;
    for (Block* b = chunk->first; b; b = b->next) {
      if (b->is_free && (stream == NONE || b->stream == stream || b->stream == NONE)) {
        if (start < 0) start = b->ptr;
      } else if (start >= 0) {
        unmap_between(start, b->ptr);
        start = -1;
      }
    }
    if (start >= 0) unmap_between(start, chunk->ptr + chunk->size);
    return pages * PAGE;
  }

  // A block with memory behind it; null, and the block is free again, without.
  Block* backed(Block* block) {
    if (!block || !set[RANGE] || back(block)) return block;
    pools[block->chunk->pool].put_back(block);
    return nullptr;
  }

  // Has memory behind a block, at the cost of free ones where it is short.
  bool back(Block* block) {
    for (bool is_short : {false, true}) {
      if (is_short && !release_pages(false, NONE)) return false;
      i64 start = block->ptr - block->chunk->ptr;
      i64 missing = num_missing(block->chunk, start, start + block->size) * PAGE;
      i64 total = reserved() + missing;
      if (missing && limit_bytes && total > limit_bytes) continue;
      if (!map_under(block)) continue;
      pools[block->chunk->pool].count_reserved(block->chunk, missing);
      if (total > reserved_peak) reserved_peak = total;
      return true;
    }
    return false;
  }

  i64 release_pages(bool include_ranges, i64 stream) {
    i64 released = 0;
    for (Pool& pool : pools) {
      std::vector<Chunk*> chunks;
      for (auto& [number, chunk] : pool.chunks) chunks.push_back(chunk);
      for (Chunk* chunk : chunks) {
        i64 found = unmap_free(chunk, stream);
        pool.count_reserved(chunk, -found);
        released += found;
        if (include_ranges && stream == NONE && !chunk->num_live) release(pool, chunk);
      }
    }
    return released;
  }

  bool failed(int status) const {
    if (status && fns.forget_error) fns.forget_error();
    return status != 0;
  }

  void release(Pool& pool, Chunk* chunk) {
    if (set[RANGE]) pool.count_reserved(chunk, -unmap_free(chunk, NONE));
    i64 ptr = chunk->ptr, size = chunk->size;
    pool.remove_chunk(chunk);
    num_source_calls++;
    Calling calling(*this);
    if (fns.acquire) fns.release(reinterpret_cast<void*>(intptr_t(ptr)));
    else if (!set[RANGE]) used_bytes -= size;
  }

  void give(Block* block) {
    if (recording && block->recorded == num_traces) note(1, block->serial, 0, 0, -1, 0);
    block->recorded = 0;
    block->users.clear();
    num_frees++;
    freed_bytes += block->size;
    Chunk* chunk = block->chunk;
    Pool& pool = pools[chunk->pool];
    pool.give(block);
    bool drop = closed || (set[FREE_IDLE] && !chunk->pre_allocated && !set[RANGE]);
    if (drop && !chunk->num_live) release(pool, chunk);
  }

  bool captures(Block* block) const {
    for (i64 stream : block->users) {
      int status = 0;
      void* handle = reinterpret_cast<void*>(intptr_t(stream));
      if (!failed(fns.is_capturing(handle, &status)) && status) return true;
    }
    return false;
  }

  // Adds an event behind all work of a stream; none once the device was waited for, as for a stream
  // that was destroyed. False: neither could be done.
  bool record(i64 stream, std::vector<void*>& events) {
    void* event = nullptr;
    if (!failed(fns.event_create(&event, EVENT_WITHOUT_TIMING))) {
      if (!failed(fns.event_record(event, reinterpret_cast<void*>(intptr_t(stream))))) {
        events.push_back(event);
        return true;
      }
      fns.event_destroy(event);
    }
    return !failed(fns.device_wait());
  }

  // While CUDA is called: the core's device is the current one, and a graph that another stream
  // captures is not ended by what this thread asks (torch's own allocator does the same).
  struct Calling {
    const Core& core;
    int before = -1, mode = CAPTURE_RELAXED;
    explicit Calling(const Core& core) : core(core) {
      if (core.device < 0) return;
      core.fns.get_device(&before);
      if (before != core.device) core.fns.set_device(core.device);
      core.fns.exchange_capture_mode(&mode);
    }
    ~Calling() {
      if (core.device < 0) return;
      core.fns.exchange_capture_mode(&mode);
      if (before != core.device) core.fns.set_device(before);
    }
  };
};

// The driver's virtual memory, as functions for the places `acquire`, `release`, `map` and `unmap`.
// A page is one piece of memory, since no part of a mapping can be taken away.
struct Driver {
  int (*address_reserve)(uint64_t*, size_t, size_t, uint64_t, uint64_t);
  int (*address_free)(uint64_t, size_t);
  int (*create)(uint64_t*, size_t, const void*, uint64_t);
  int (*release)(uint64_t);
  int (*map)(uint64_t, size_t, size_t, uint64_t, uint64_t);
  int (*set_access)(uint64_t, size_t, const void*, size_t);
  int (*unmap)(uint64_t, size_t);
  int (*get_device)(int*);  // of the runtime, as the next two
  int (*set_device)(int);
  int (*device_wait)();
} driver;

struct AllocationProperties {  // CUmemAllocationProp
  int type = 1, handle_types = 0, location = 1, device;  // pinned memory on a device
  void* metadata = nullptr;
  unsigned char flags[8] = {};
};
struct AccessDescription {  // CUmemAccessDesc
  int location = 1, device, flags = 3;  // to be read and written
};

struct Range {
  uint64_t ptr;
  size_t size;
  int device;
  std::unordered_map<uint64_t, uint64_t> handles;  // by page
};
std::map<uint64_t, Range> ranges;
std::mutex ranges_mutex;

// The range that holds an address that was reserved here; the mutex is held.
Range& range_of(uint64_t ptr) { return std::prev(ranges.upper_bound(ptr))->second; }

int driver_unmap(Range& range, uint64_t ptr, size_t size) {
  int status = 0;
  for (uint64_t page = ptr; page < ptr + size; page += PAGE) {
    auto found = range.handles.find(page);
    if (found == range.handles.end()) continue;
    if (int each = driver.unmap(page, PAGE)) status = each;
    driver.release(found->second);
    range.handles.erase(found);
  }
  return status;
}

int driver_map(Range& range, uint64_t ptr, size_t size) {
  AllocationProperties properties;
  properties.device = range.device;
  for (uint64_t page = ptr; page < ptr + size; page += PAGE) {
    uint64_t handle = 0;
    if (int status = driver.create(&handle, PAGE, &properties, 0)) return status;
    if (int status = driver.map(page, PAGE, 0, handle, 0)) {
      driver.release(handle);
      return status;
    }
    range.handles[page] = handle;
  }
  AccessDescription access;
  access.device = range.device;
  return driver.set_access(ptr, size, &access, 1);
}

// Holds a core's mutex and says whose it is.
class Held {
 public:
  Held(Core& core, bool wait) : core_(core) {
    reentrant = core.owner.load(std::memory_order_relaxed) == std::this_thread::get_id();
    if (reentrant) return;
    if (wait) core.mutex.lock();
    else if (!core.mutex.try_lock()) return;
    held = true;
    core.owner.store(std::this_thread::get_id(), std::memory_order_relaxed);
  }
  ~Held() {
    if (!held) return;
    core_.owner.store(std::thread::id(), std::memory_order_relaxed);
    core_.mutex.unlock();
  }
  bool held = false, reentrant = false;

 private:
  Core& core_;
};

// Rows of numbers for a caller that may have brought too little room: how many there are.
i64 copy_out(const std::vector<i64>& rows, i64* out, i64 room) {
  if (i64(rows.size()) <= room) std::memcpy(out, rows.data(), rows.size() * sizeof(i64));
  return i64(rows.size());
}

// The cores that serve torch, one for each device, made when a device is first asked.
constexpr int MAX_DEVICES = 64;
std::atomic<Core*> serving[MAX_DEVICES];
std::mutex serving_mutex;
std::unique_ptr<std::pair<std::vector<i64>, Functions>> served_with;

Core* core_of(int device) {
  if (device < 0 || device >= MAX_DEVICES) return nullptr;
  if (Core* core = serving[device].load(std::memory_order_acquire)) return core;
  std::lock_guard<std::mutex> guard(serving_mutex);
  if (Core* core = serving[device].load(std::memory_order_acquire)) return core;
  if (!served_with) return nullptr;
  auto core = std::make_unique<Core>(served_with->first.data(), served_with->second);
  core->device = device;
  if (core->pre_allocate()) {
    core->release_idle(true, NONE);
    return nullptr;
  }
  serving[device].store(core.get(), std::memory_order_release);
  return core.release();
}

}  // namespace

#define GA extern "C" __attribute__((visibility("default")))

// Raised with every change of what is called here; binding.py asks for the one that it knows.
GA i64 ga_version() { return 6; }

GA Core* ga_open(const i64* settings, const Functions* functions) {
  return new Core(settings, *functions);
}

// 0, or which pool's pre-allocation had no room (1 small, 2 large).
GA i64 ga_pre_allocate(Core* core) {
  Held lock(*core, true);
  return core->pre_allocate();
}

// A request that the free lists can serve while nobody is inside; 0 otherwise. It never waits and
// never calls the source, so that Python calls it without letting its own lock go.
GA i64 ga_try_malloc(Core* core, i64 size, i64 stream) {
  Held lock(*core, false);
  return lock.held ? core->place_from_lists(size, stream) : i64(NO_ROOM);
}

// An address; NO_ROOM, CLOSED or REENTRANT. The second attempt, `last`, waits for events and may use
// up the pre-allocation; the caller collects garbage before it.
GA i64 ga_malloc(Core* core, i64 size, i64 stream, int last) {
  Held lock(*core, true);
  if (lock.reentrant) return REENTRANT;
  if (core->closed) return CLOSED;
  return last ? core->last_attempt(size, stream) : core->first_attempt(size, stream);
}

// 0, or -1 for an address that is not allocated. Never waits for another thread.
GA i64 ga_free(Core* core, i64 ptr) {
  {
    std::lock_guard<std::mutex> guard(core->table);
    auto found = core->live.find(ptr);
    if (found == core->live.end()) return -1;
    core->pending.push_back(found->second);
    core->live.erase(found);
    core->has_pending.store(true, std::memory_order_relaxed);
  }
  Held lock(*core, false);
  if (lock.held) core->drain();
  return 0;
}

// 0, or -1 for an address that is not allocated.
GA i64 ga_record_stream(Core* core, i64 ptr, i64 stream) {
  std::lock_guard<std::mutex> guard(core->table);
  auto found = core->live.find(ptr);
  if (found == core->live.end()) return -1;
  Block* block = found->second;
  if (stream == block->stream) return 0;
  auto place = block->users.begin();
  while (place != block->users.end() && *place < stream) ++place;
  if (place == block->users.end() || *place != stream) block->users.insert(place, stream);
  return 0;
}

// Bytes given back to the source; `of_stream` 0: of all streams.
GA i64 ga_release_idle(Core* core, int include_pre_allocated, int of_stream, i64 stream) {
  Held lock(*core, true);
  if (lock.reentrant) return REENTRANT;
  core->drain();
  return core->release_idle(include_pre_allocated, of_stream ? stream : NONE);
}

// Three numbers a row of a plan (struct Planned), of so many bytes; no rows: follow none. 0, or how
// many blocks of the plan before are in use, or NO_MEMORY.
GA i64 ga_follow(Core* core, const i64* rows, i64 count, i64 size) {
  Held lock(*core, true);
  if (lock.reentrant) return REENTRANT;
  core->drain();
  return core->follow(std::vector<i64>(rows, rows + count), size);
}

GA i64 ga_begin_step(Core* core) {
  Held lock(*core, true);
  if (lock.reentrant) return REENTRANT;
  core->drain();
  core->begin_step();
  return 0;
}

// Whether there is a range for the plan, and how many requests it placed and did not.
GA i64 ga_plan_use(Core* core, i64* out) {
  Held lock(*core, true);
  if (lock.reentrant) return REENTRANT;
  out[0] = core->pools[1].planned != nullptr;
  out[1] = core->num_planned;
  out[2] = core->num_unplanned;
  return 0;
}

GA i64 ga_close(Core* core) {
  Held lock(*core, true);
  if (lock.reentrant) return REENTRANT;
  core->drain();
  core->closed = true;
  core->reap(false, true);
  core->release_idle(true, NONE);
  return 0;
}

GA i64 ga_limit(Core* core) { return core->limit_bytes; }

GA void ga_set_limit(Core* core, i64 bytes) {
  Held lock(*core, true);
  core->limit_bytes = bytes;
}

GA i64 ga_reset_peaks(Core* core) {
  Held lock(*core, true);
  if (lock.reentrant) return REENTRANT;
  core->drain();
  core->reset_peaks();
  return 0;
}

// For each pool ten counters, then thirteen of both; two of them are of what `stream` may use. See
// native/binding.py.
GA i64 ga_stats(Core* core, i64 stream, i64* out) {
  Held lock(*core, true);
  if (lock.reentrant) return REENTRANT;
  core->drain();
  core->write_stats(stream, out);
  return 0;
}

// Every chunk with its blocks, then the free lists; how many numbers that is.
GA i64 ga_snapshot(Core* core, i64* out, i64 room) {
  Held lock(*core, true);
  if (lock.reentrant) return REENTRANT;
  core->drain();
  return copy_out(core->snapshot(), out, room);
}

// Starts a trace afresh; what is live becomes its beginning.
GA i64 ga_start_recording(Core* core) {
  Held lock(*core, true);
  if (lock.reentrant) return REENTRANT;
  core->drain();
  core->start_recording();
  return 0;
}

// Puts the mark of a number into the trace, if one is being recorded.
GA i64 ga_mark(Core* core, i64 number) {
  Held lock(*core, true);
  if (lock.reentrant) return REENTRANT;
  core->drain();
  if (core->recording) core->note(2, number, 0, 0, -1, 0);
  return core->recording;
}

// Six numbers an event; how many there are in all. The trace ends once they are read.
GA i64 ga_stop_recording(Core* core, i64* out, i64 room) {
  Held lock(*core, true);
  if (lock.reentrant) return REENTRANT;
  core->drain();
  i64 count = copy_out(core->events, out, room);
  if (count <= room) {
    core->recording = false;
    core->events.clear();
  }
  return count;
}

// Rows of (0 malloc, 1 free or 2 beginning of a step, dense number of the block, size, stream); `ptrs` has room for each
// block. The index of the request that failed, or `num_rows`.
GA i64 ga_run(Core* core, const i64* rows, i64 num_rows, i64* ptrs) {
  for (i64 i = 0; i < num_rows; i++) {
    const i64* row = rows + 4 * i;
    if (row[0] == 2) {
      ga_begin_step(core);
      continue;
    }
    i64& ptr = ptrs[row[1]];
    if (row[0]) {
      if (ptr) ga_free(core, ptr);
      continue;
    }
    ptr = row[2] ? ga_try_malloc(core, row[2], row[3]) : 0;
    for (int last = 0; row[2] && ptr <= 0 && last < 2; last++)
      ptr = ga_malloc(core, row[2], row[3], last);
    if (row[2] && ptr <= 0) return i;
  }
  return num_rows;
}

// What is known of the request that failed last: its bytes and stream, the limit, then as ga_stats;
// how many numbers, 0 when none failed.
GA i64 ga_last_failure(Core* core, i64* out, i64 room) {
  Held lock(*core, true);
  return lock.reentrant ? i64(REENTRANT) : copy_out(core->failure, out, room);
}

// Two functions once more, in the shape of CPython's METH_FASTCALL, because a call through ctypes
// costs more than what is called. Objects are only handed on, to four functions of Python's that
// ga_python is given, so that nothing here is compiled against a version of it. `self` is the core's
// address as a Python number. They run with Python's lock held, as ga_try_malloc must.
struct Python {
  i64 (*as_number)(void*);
  void* (*number)(i64);
  void* (*has_error)();
  void (*forget_error)();
  void* (*in_capsule)(void*, const char*);
} python;

// False, and no error, for an object that is no number of 64 bits.
static bool read_number(void* object, i64& out) {
  out = python.as_number(object);
  if (out != -1 || !python.has_error()) return true;
  python.forget_error();
  return false;
}

static Core* core_of_self(void* self) { return reinterpret_cast<Core*>(python.as_number(self)); }

// (size, stream) -> as ga_try_malloc; 0 also for what are no sizes or streams.
static void* py_try_malloc(void* self, void* const* arguments, ptrdiff_t count) {
  i64 size, stream;
  bool fits = count == 2 && read_number(arguments[0], size) && read_number(arguments[1], stream);
  fits = fits && size > 0 && size <= MOST_BYTES;
  return python.number(fits ? ga_try_malloc(core_of_self(self), size, stream) : i64(NO_ROOM));
}

// (address) -> as ga_free; -2 for what is no number of 64 bits.
static void* py_free(void* self, void* const* arguments, ptrdiff_t count) {
  i64 ptr;
  bool is_number = count == 1 && read_number(arguments[0], ptr);
  return python.number(is_number ? ga_free(core_of_self(self), ptr) : i64(-2));
}

// A PyMethodDef, which lives as long as what is made of it: for ever.
struct MethodDefinition {
  const char* name;
  void* (*function)(void*, void* const*, ptrdiff_t);
  int flags;
  const char* doc;
};
constexpr int METH_FASTCALL = 0x80;
GA MethodDefinition ga_py_try_malloc = {"try_malloc", py_try_malloc, METH_FASTCALL, nullptr};
GA MethodDefinition ga_py_free = {"free", py_free, METH_FASTCALL, nullptr};

// What ends the core in a capsule of Python's, which gives nothing back.
GA void ga_py_end(void* capsule) { delete static_cast<Core*>(python.in_capsule(capsule, nullptr)); }

GA void ga_python(const Python* functions) { python = *functions; }

GA void ga_driver(const Driver* functions) { driver = *functions; }

// Addresses for the current device.
GA int ga_driver_reserve(void** out, size_t size) {
  Range range{0, size, 0, {}};
  if (int status = driver.get_device(&range.device)) return status;
  if (int status = driver.address_reserve(&range.ptr, size, 0, 0, 0)) return status;
  std::lock_guard<std::mutex> guard(ranges_mutex);
  *out = reinterpret_cast<void*>(range.ptr);
  ranges[range.ptr] = std::move(range);
  return 0;
}

GA int ga_driver_free(void* ptr) {
  std::lock_guard<std::mutex> guard(ranges_mutex);
  auto found = ranges.find(reinterpret_cast<uint64_t>(ptr));
  int status = driver.address_free(found->second.ptr, found->second.size);
  ranges.erase(found);
  return status;
}

// All of it, or nothing.
GA int ga_driver_map(void* ptr, size_t size) {
  std::lock_guard<std::mutex> guard(ranges_mutex);
  uint64_t start = reinterpret_cast<uint64_t>(ptr);
  Range& range = range_of(start);
  int status = driver_map(range, start, size);
  if (status) driver_unmap(range, start, size);
  return status;
}

// Once the device has done all its work, which cuMemUnmap does not wait for.
GA int ga_driver_unmap(void* ptr, size_t size) {
  std::lock_guard<std::mutex> guard(ranges_mutex);
  uint64_t start = reinterpret_cast<uint64_t>(ptr);
  Range& range = range_of(start);
  int current = 0;
  if (int status = driver.get_device(&current)) return status;
  if (current != range.device) driver.set_device(range.device);
  int status = driver.device_wait();
  if (current != range.device) driver.set_device(current);
  return status ? status : driver_unmap(range, start, size);
}

// Serve torch from here on, with a core for each device. 0, or -1 when it is served otherwise.
GA i64 ga_serve(const i64* settings, const Functions* functions) {
  std::lock_guard<std::mutex> guard(serving_mutex);
  std::vector<i64> copy(settings, settings + NUM_SETTINGS);
  if (served_with) return served_with->first == copy ? 0 : -1;
  served_with = std::make_unique<std::pair<std::vector<i64>, Functions>>(copy, *functions);
  return 0;
}

// The core that serves a device; null when there is none, or its pre-allocation had no room.
GA Core* ga_core_of(int device) { return core_of(device); }

// The same if it is there already, and null otherwise.
GA Core* ga_core_if_any(int device) {
  return device < 0 || device >= MAX_DEVICES ? nullptr : serving[device].load(std::memory_order_acquire);
}

// What torch asks of a MemPool's allocator: it makes its own out-of-memory error of a null.
GA void* ga_segment_malloc(ptrdiff_t size, int device, void* stream) {
  Core* core = core_of(device);
  if (!core || size <= 0) return nullptr;
  i64 handle = i64(intptr_t(stream));
  i64 ptr = ga_malloc(core, size, handle, 0);
  if (ptr == NO_ROOM) ptr = ga_malloc(core, size, handle, 1);
  return ptr > 0 ? reinterpret_cast<void*>(intptr_t(ptr)) : nullptr;
}

GA void ga_segment_free(void* ptr, ptrdiff_t, int device, void*) {
  Core* core = core_of(device);
  if (core && ptr) ga_free(core, i64(intptr_t(ptr)));
}

// What torch asks of an allocator in place of its own, which would take a null for a tensor's
// address: the one exception that leaves this library. torch makes a RuntimeError of it.
GA void* ga_replace_malloc(ptrdiff_t size, int device, void* stream) {
  if (size <= 0) return nullptr;
  void* ptr = ga_segment_malloc(size, device, stream);
  if (!ptr) throw std::bad_alloc();
  return ptr;
}

GA void ga_replace_record_stream(void* ptr, void* stream) {
  for (auto& each : serving)
    if (Core* core = each.load(std::memory_order_acquire))
      if (!ga_record_stream(core, i64(intptr_t(ptr)), i64(intptr_t(stream)))) return;
}

GA void ga_replace_empty_cache() {
  for (auto& each : serving)
    if (Core* core = each.load(std::memory_order_acquire)) ga_release_idle(core, 0, 0, 0);
}
