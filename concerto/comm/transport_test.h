// What every transport must do, as functions over the world communicator of each rank; run by the tests of comm/local
// and of comm/mpi. Every rank knows what every rank holds (values are drawn from seed, rank and place), so each computes
// by itself the bits that must come out.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "concerto/base/allocation_guard.h"
#include "concerto/base/part.h"
#include "concerto/base/rng.h"
#include "concerto/comm/communicator.h"

namespace concerto::transport_test {

inline size_t at(int64_t i) { return static_cast<size_t>(i); }

template <class T>
T drawn(uint64_t seed, int rank, int64_t i) {
  const double x = Rng(seed, static_cast<uint64_t>(rank)).normal(at(i)) * (i % 3 ? 1 : 1000);
  if constexpr (std::is_same_v<T, bf16>)
    return bf16(static_cast<float>(x));
  else if constexpr (std::is_integral_v<T>)
    return static_cast<T>(x * 100);
  else
    return static_cast<T>(x);
}

template <class T>
std::vector<T> draw(uint64_t seed, int rank, int64_t n) {
  std::vector<T> values(at(n));
  for (int64_t i = 0; i < n; ++i) values[at(i)] = drawn<T>(seed, rank, i);
  return values;
}

template <class T>
View view(std::vector<T>& values) {
  return values.empty() ? View() : View(values.data(), Shape{std::ssize(values)}, dtype_of<T>());
}
template <class T>
View part(std::vector<T>& values, Part p) {
  return View(values.data() + p.begin, Shape{p.count}, dtype_of<T>());
}

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

// The sum over ranks 0, 1, ... of draw(seed, r, n), as a loop that anyone can check.
template <class T, class Out = T>
std::vector<Out> sum_of_ranks(uint64_t seed, int ranks, int64_t n, bool bf16_wire = false) {
  using Sum = std::conditional_t<std::is_same_v<T, bf16>, float, T>;
  std::vector<Out> out(at(n));
  for (int64_t i = 0; i < n; ++i) {
    Sum sum{};
    for (int r = 0; r < ranks; ++r) {
      Sum x = static_cast<Sum>(drawn<T>(seed, r, i));
      if constexpr (std::is_same_v<T, float>)
        if (bf16_wire && ranks > 1) x = static_cast<float>(bf16(x));
      sum = r == 0 ? x : static_cast<Sum>(sum + x);
    }
    out[at(i)] = Out(sum);
  }
  return out;
}

// Uneven, some empty: what rank `from` sends to rank `to`.
inline int64_t ragged(int from, int to, int64_t most) {
  return (from * 7 + to * 3) % 4 == 0 ? 0 : (from * 31 + to * 17 + 5) * most / 97 % (most + 1);
}

template <class T>
void check_all_to_all(Communicator& comm, int64_t most) {
  const int n = comm.size(), me = comm.rank();
  std::vector<std::vector<T>> to, from, want;
  for (int r = 0; r < n; ++r) {
    to.push_back(draw<T>(at(1000 + r), me, ragged(me, r, most)));
    want.push_back(draw<T>(at(1000 + me), r, ragged(r, me, most)));
    from.emplace_back(want.back().size());
  }
  std::vector<View> to_views, from_views;
  for (auto& values : to) to_views.push_back(view(values));
  for (auto& values : from) from_views.push_back(view(values));
  const int64_t before = comm.traffic().all_to_all;
  comm.all_to_all(to_views, from_views);
  int64_t sent = 0;
  for (int r = 0; r < n; ++r) {
    EXPECT_TRUE(same_bits(from[at(r)], want[at(r)])) << "rank " << me << " from " << r;
    if (r != me) sent += std::ssize(to[at(r)]) * static_cast<int64_t>(sizeof(T));
  }
  EXPECT_EQ(comm.traffic().all_to_all - before, sent);
}

template <class T>
void check_all_gather(Communicator& comm, int64_t total) {
  const int n = comm.size(), me = comm.rank();
  std::vector<T> all(at(total)), want(at(total));
  for (int r = 0; r < n; ++r) {
    const Part p = part_of(total, n, r);
    const auto values = draw<T>(2, r, p.count);
    std::copy(values.begin(), values.end(), want.begin() + p.begin);
  }
  std::vector<View> parts;
  for (int r = 0; r < n; ++r) parts.push_back(part(all, part_of(total, n, r)));
  std::vector<T> mine = draw<T>(2, me, part_of(total, n, me).count);
  const int64_t before = comm.traffic().all_gather;
  comm.all_gather(view(mine), parts);
  EXPECT_TRUE(same_bits(all, want)) << "rank " << me;
  EXPECT_EQ(comm.traffic().all_gather - before, std::ssize(mine) * static_cast<int64_t>(sizeof(T)) * (n - 1));

  // In place.
  std::fill(all.begin(), all.end(), T(0));
  std::copy(mine.begin(), mine.end(), all.begin() + part_of(total, n, me).begin);
  comm.all_gather(parts[at(me)], parts);
  EXPECT_TRUE(same_bits(all, want)) << "rank " << me << ", in place";
}

template <class T, class Out = T>
void check_reduce_scatter(Communicator& comm, int64_t total, Wire wire = Wire::kAsIs) {
  const int n = comm.size(), me = comm.rank();
  const Part mine = part_of(total, n, me);
  std::vector<T> values = draw<T>(3, me, total);
  const auto sums = sum_of_ranks<T, Out>(3, n, total, wire == Wire::kBF16);
  const std::vector<Out> want(sums.begin() + mine.begin, sums.begin() + mine.end());
  std::vector<View> parts;
  for (int r = 0; r < n; ++r) parts.push_back(part(values, part_of(total, n, r)));
  std::vector<Out> out(at(mine.count));
  const int64_t before = comm.traffic().reduce_scatter;
  comm.reduce_scatter(parts, view(out), wire);
  EXPECT_TRUE(same_bits(out, want)) << "rank " << me;
  EXPECT_EQ(comm.traffic().reduce_scatter - before,
            (total - mine.count) * (wire == Wire::kBF16 ? 2 : static_cast<int64_t>(sizeof(T))));
  if constexpr (std::is_same_v<T, Out>) {  // in place; the other parts stay as they are
    auto after = draw<T>(3, me, total);
    std::copy(want.begin(), want.end(), after.begin() + mine.begin);
    comm.reduce_scatter(parts, parts[at(me)], wire);
    EXPECT_TRUE(same_bits(values, after)) << "rank " << me << ", in place";
  }
}

template <class T>
void check_all_reduce(Communicator& comm, int64_t total) {
  std::vector<T> values = draw<T>(4, comm.rank(), total);
  const auto want = sum_of_ranks<T>(4, comm.size(), total);
  comm.all_reduce(view(values));
  EXPECT_TRUE(same_bits(values, want)) << "rank " << comm.rank();
}

// Pieces of uneven sizes with owners in no order; some ranks own none, some pieces are empty.
template <class T>
void check_owners(Communicator& comm, Wire wire) {
  const int n = comm.size(), me = comm.rank();
  const std::vector<int64_t> sizes = {5, 0, 1300, 1, 64, 7};
  const auto owner = [&](size_t i) { return static_cast<int>((i * 5 + 2) % at(n)); };
  std::vector<std::vector<T>> values;
  std::vector<OwnedPiece> pieces;
  for (size_t i = 0; i < sizes.size(); ++i) values.push_back(draw<T>(50 + i, me, sizes[i]));
  for (size_t i = 0; i < sizes.size(); ++i) pieces.push_back({view(values[i]), owner(i)});
  comm.reduce_to_owners(pieces, wire);
  for (size_t i = 0; i < sizes.size(); ++i) {
    const auto sum = sum_of_ranks<T>(50 + i, n, sizes[i], wire == Wire::kBF16);
    EXPECT_TRUE(same_bits(values[i], owner(i) == me ? sum : draw<T>(50 + i, me, sizes[i]))) << "piece " << i;
  }
  comm.broadcast_from_owners(pieces);
  for (size_t i = 0; i < sizes.size(); ++i)
    EXPECT_TRUE(same_bits(values[i], sum_of_ranks<T>(50 + i, n, sizes[i], wire == Wire::kBF16))) << "piece " << i;
}

// Round the ring, several at once each way, the waits in another order than the starts.
inline void check_send_recv(Communicator& comm) {
  const int n = comm.size(), me = comm.rank();
  if (n == 1) return;
  const int next = (me + 1) % n, before = (me + n - 1) % n;
  constexpr int kMessages = 5;
  std::vector<std::vector<float>> out, in;
  for (int i = 0; i < kMessages; ++i) {
    out.push_back(draw<float>(at(60 + i), me, i * 1000));
    in.emplace_back(at(i * 1000));
  }
  std::vector<CommTicket> sends, recvs;
  const int64_t sent = comm.traffic().send;
  for (int i = 0; i < kMessages; ++i) {
    sends.push_back(comm.start_send(view(out[at(i)]), next));
    recvs.push_back(comm.start_recv(view(in[at(i)]), before));
  }
  for (int i = kMessages - 1; i >= 0; --i) recvs[at(i)].wait();
  for (CommTicket& ticket : sends) ticket.wait();
  for (int i = 0; i < kMessages; ++i) EXPECT_TRUE(same_bits(in[at(i)], draw<float>(at(60 + i), before, i * 1000)));
  EXPECT_EQ(comm.traffic().send - sent, (1 + 2 + 3 + 4) * 1000 * 4);
}

// Many operations under way in one group and in a second, waited for in an order of each rank's own.
inline void check_many_under_way(Communicator& comm, Communicator& other) {
  const int n = comm.size(), me = comm.rank();
  const int64_t total = 3000;
  constexpr int kRounds = 6;
  std::vector<std::vector<float>> sums, gathered, mine, small;
  std::vector<std::vector<View>> parts(kRounds);
  std::vector<CommTicket> tickets;
  for (int i = 0; i < kRounds; ++i) {
    sums.push_back(draw<float>(4, me, total));
    gathered.emplace_back(at(total));
    mine.push_back(draw<float>(2, me, part_of(total, n, me).count));
    small.push_back(draw<float>(4, other.rank(), 10));
  }
  for (int i = 0; i < kRounds; ++i) {
    for (int r = 0; r < n; ++r) parts[at(i)].push_back(part(gathered[at(i)], part_of(total, n, r)));
    tickets.push_back(comm.start_all_reduce(view(sums[at(i)])));
    tickets.push_back(comm.start_all_gather(view(mine[at(i)]), parts[at(i)]));
    tickets.push_back(other.start_all_reduce(view(small[at(i)])));
  }
  std::vector<CommTicket> in_order(tickets.size());
  for (size_t i = 0; i < tickets.size(); ++i) in_order[(i * 7 + at(me)) % tickets.size()] = std::move(tickets[i]);
  for (CommTicket& ticket : in_order) ticket.wait();
  for (int i = 0; i < kRounds; ++i) {
    EXPECT_TRUE(same_bits(sums[at(i)], sum_of_ranks<float>(4, n, total)));
    EXPECT_TRUE(same_bits(small[at(i)], sum_of_ranks<float>(4, other.size(), 10)));
    for (int r = 0; r < n; ++r) {
      const Part p = part_of(total, n, r);
      EXPECT_EQ(std::memcmp(gathered[at(i)].data() + p.begin, draw<float>(2, r, p.count).data(), at(p.count) * 4), 0);
    }
  }
}

template <class T>
void check_type(Communicator& comm) {
  for (const int64_t total : {0, 1, 5, 1000, 20000}) {
    check_all_to_all<T>(comm, total);
    check_all_gather<T>(comm, total);
    check_reduce_scatter<T>(comm, total);
    check_all_reduce<T>(comm, total);
  }
  check_owners<T>(comm, Wire::kAsIs);
}

inline void check_operations(Communicator& comm) {
  check_type<float>(comm);
  check_type<double>(comm);
  check_type<bf16>(comm);
  check_type<int32_t>(comm);
  check_type<int64_t>(comm);
  check_reduce_scatter<bf16, float>(comm, 3000);
  check_reduce_scatter<float>(comm, 3000, Wire::kBF16);
  check_owners<float>(comm, Wire::kBF16);
  check_send_recv(comm);
  comm.barrier();
}

// Groups of groups: every second rank, backwards, then pairs of these; one rank stands aside.
inline void check_split(Communicator& comm) {
  const int n = comm.size(), me = comm.rank();
  const auto half = comm.split(me % 2, -me, "half");
  ASSERT_TRUE(half);
  EXPECT_EQ(half->name(), "half");
  EXPECT_EQ(half->size(), (n + 1 - me % 2) / 2);
  EXPECT_EQ(half->rank(), half->size() - 1 - me / 2);
  check_all_reduce<float>(*half, 100);
  const int stands_aside = half->size() > 1 ? 0 : -1;
  const auto pair = half->split(half->rank() == stands_aside ? -1 : half->rank() / 2, half->rank(), "pair");
  ASSERT_EQ(pair == nullptr, half->rank() == stands_aside);
  if (pair) {
    check_all_to_all<float>(*pair, 100);
    check_send_recv(*pair);
  }
  const auto same = comm.split(0, 0, "same");  // equal keys: the order of the ranks
  ASSERT_EQ(same->rank(), me);
  check_many_under_way(comm, *half);
  check_many_under_way(*half, *same);
}

// From the second round of a step on, operator new is not called.
inline void check_allocations(Communicator& comm) {
  const int n = comm.size(), me = comm.rank();
  constexpr int64_t kSmall = 1000, kLarge = 50000;
  std::vector<float> a(kSmall), b(kSmall), c(kLarge), incoming(at(kSmall * n)), message(100), other(100);
  std::vector<View> a_parts, b_parts, incoming_parts;
  std::vector<OwnedPiece> pieces;
  for (int r = 0; r < n; ++r) {
    a_parts.push_back(part(a, part_of(kSmall, n, r)));
    b_parts.push_back(part(b, part_of(kSmall, n, me)));
    incoming_parts.push_back(part(incoming, {r * kSmall, part_of(kSmall, n, r).count}));
    pieces.push_back({part(c, part_of(kLarge, n, r)), r});
  }
  const auto round = [&] {
    CommTicket owners = comm.start_reduce_to_owners(pieces, Wire::kBF16), send, recv;
    CommTicket gather = comm.start_all_gather(a_parts[at(me)], a_parts);
    CommTicket swap = comm.start_all_to_all(b_parts, incoming_parts);
    if (n > 1) send = comm.start_send(view(message), (me + 1) % n);
    if (n > 1) recv = comm.start_recv(view(other), (me + n - 1) % n);
    recv.wait(), swap.wait(), owners.wait(), gather.wait(), send.wait();
    comm.broadcast_from_owners(pieces);
    comm.barrier();
  };
  round();
  comm.barrier();
  if (me == 0) AllocationGuard::reset();
  comm.barrier();
  {
    const AllocationGuard guard;
    for (int i = 0; i < 20; ++i) round();
  }
  comm.barrier();
  EXPECT_EQ(AllocationGuard::count(), 0) << AllocationGuard::first_stack();
}

// The bits of a number of sums, in one text.
inline std::string bits_of_sums(Communicator& comm) {
  std::vector<float> values = draw<float>(9, comm.rank(), 4001);
  std::vector<View> parts;
  for (int r = 0; r < comm.size(); ++r) parts.push_back(part(values, part_of(4001, comm.size(), r)));
  for (int i = 0; i < 3; ++i) {
    comm.reduce_scatter(parts, parts[at(comm.rank())]);
    comm.all_gather(parts[at(comm.rank())], parts);
    for (float& value : values) value *= 0.3f;
    comm.all_reduce(view(values));
    for (float& value : values) value *= 0.3f;
  }
  return hash_text(hash64(values.data(), values.size() * sizeof(float)));
}

}  // namespace concerto::transport_test
