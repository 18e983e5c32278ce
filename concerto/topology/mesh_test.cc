#include "concerto/topology/mesh.h"

#include <gtest/gtest.h>

#include <map>
#include <set>

#include "concerto/base/error.h"

namespace concerto {
namespace {

constexpr MeshGroup kGroups[] = {MeshGroup::kWorld, MeshGroup::kTp,       MeshGroup::kDp,  MeshGroup::kPp,
                                 MeshGroup::kStage, MeshGroup::kDispatch, MeshGroup::kEtp, MeshGroup::kEdp};

// Every mesh of at most `ranks` ranks.
std::vector<MeshSizes> all_meshes(int ranks) {
  std::vector<MeshSizes> all;
  for (int tp = 1; tp <= ranks; ++tp)
    for (int dp = 1; tp * dp <= ranks; ++dp)
      for (int pp = 1; tp * dp * pp <= ranks; ++pp)
        for (int ep = 1; ep <= tp * dp; ++ep)
          for (int etp = 1; ep * etp <= tp * dp; ++etp)
            if (tp * dp % (ep * etp) == 0) all.push_back({.tp = tp, .dp = dp, .pp = pp, .ep = ep, .etp = etp});
  return all;
}

std::string name(const MeshSizes& s) {
  return fmt::format("tp {} dp {} pp {} ep {} etp {}", s.tp, s.dp, s.pp, s.ep, s.etp);
}

// What the members of a group share, as the header states it.
std::vector<int> shared(const MeshPlace& p, MeshGroup group) {
  switch (group) {
    case MeshGroup::kWorld:
      return {};
    case MeshGroup::kTp:
      return {p.pp, p.dp};
    case MeshGroup::kDp:
      return {p.pp, p.tp};
    case MeshGroup::kPp:
      return {p.dp, p.tp};
    case MeshGroup::kStage:
      return {p.pp};
    case MeshGroup::kDispatch:
      return {p.pp, p.edp};
    case MeshGroup::kEtp:
      return {p.pp, p.edp, p.ep};
    case MeshGroup::kEdp:
      return {p.pp, p.ep, p.etp};
  }
  return {-1};
}

int group_size(const MeshSizes& s, MeshGroup group) {
  switch (group) {
    case MeshGroup::kWorld:
      return s.world();
    case MeshGroup::kTp:
      return s.tp;
    case MeshGroup::kDp:
      return s.dp;
    case MeshGroup::kPp:
      return s.pp;
    case MeshGroup::kStage:
      return s.tp * s.dp;
    case MeshGroup::kDispatch:
      return s.ep * s.etp;
    case MeshGroup::kEtp:
      return s.etp;
    case MeshGroup::kEdp:
      return s.tp * s.dp / (s.ep * s.etp);
  }
  return -1;
}

TEST(Mesh, CoordinatesRoundTripInEveryMeshUpTo24Ranks) {
  for (const MeshSizes& sizes : all_meshes(24)) {
    const Mesh mesh(sizes);
    for (int r = 0; r < sizes.world(); ++r) {
      const MeshPlace p = mesh.place(r);
      ASSERT_EQ(mesh.rank(p.pp, p.dp, p.tp), r) << name(sizes);
      ASSERT_EQ(mesh.expert_rank(p.pp, p.edp, p.ep, p.etp), r) << name(sizes);
      for (const auto& [at, size] : {std::pair{p.tp, sizes.tp},
                                     {p.dp, sizes.dp},
                                     {p.pp, sizes.pp},
                                     {p.ep, sizes.ep},
                                     {p.etp, sizes.etp},
                                     {p.edp, sizes.edp()}})
        ASSERT_TRUE(at >= 0 && at < size) << name(sizes);
    }
  }
}

TEST(Mesh, GroupsOfEachKindPartitionTheWorldAsStated) {
  for (const MeshSizes& sizes : all_meshes(24)) {
    const Mesh mesh(sizes);
    for (const MeshGroup group : kGroups) {
      std::map<std::vector<int>, std::vector<int>> expected;  // what is shared -> ranks
      for (int r = 0; r < sizes.world(); ++r) expected[shared(mesh.place(r), group)].push_back(r);
      std::set<int> colors;
      for (const auto& [key, ranks] : expected) {
        ASSERT_EQ(ranks.size(), static_cast<size_t>(group_size(sizes, group))) << name(sizes);
        const int color = mesh.color(ranks[0], group);
        ASSERT_TRUE(colors.insert(color).second) << name(sizes);
        ASSERT_EQ(mesh.members(ranks[0], group), ranks) << name(sizes);  // ascending
        for (const int r : ranks) ASSERT_EQ(mesh.color(r, group), color) << name(sizes);
      }
      // Colors are the numbers of the groups.
      ASSERT_EQ(*colors.begin(), 0) << name(sizes);
      ASSERT_EQ(*colors.rbegin() + 1, static_cast<int>(expected.size())) << name(sizes);
    }
  }
}

TEST(Mesh, NeighboursShareTensorAndExpertSlices) {
  for (const MeshSizes& sizes : all_meshes(24)) {
    const Mesh mesh(sizes);
    for (int r = 0; r < sizes.world(); ++r)
      for (const MeshGroup group : {MeshGroup::kTp, MeshGroup::kEtp, MeshGroup::kDispatch, MeshGroup::kStage}) {
        const std::vector<int> ranks = mesh.members(r, group);
        ASSERT_EQ(ranks.back() - ranks.front() + 1, static_cast<int>(ranks.size())) << name(sizes);
      }
  }
}

TEST(Mesh, ExpertsFoldOverTensorAndDataRanks) {
  const Mesh mesh({.tp = 2, .dp = 4, .pp = 4, .ep = 8});  // the recipe TP2 x PP4 x EP8 on 32 ranks
  EXPECT_EQ(mesh.sizes().world(), 32);
  EXPECT_EQ(mesh.sizes().edp(), 1);
  EXPECT_EQ(mesh.members(9, MeshGroup::kTp), (std::vector<int>{8, 9}));
  EXPECT_EQ(mesh.members(9, MeshGroup::kDp), (std::vector<int>{9, 11, 13, 15}));
  EXPECT_EQ(mesh.members(9, MeshGroup::kPp), (std::vector<int>{1, 9, 17, 25}));
  EXPECT_EQ(mesh.members(9, MeshGroup::kDispatch), (std::vector<int>{8, 9, 10, 11, 12, 13, 14, 15}));
  EXPECT_EQ(mesh.members(9, MeshGroup::kEdp), (std::vector<int>{9}));
}

TEST(Mesh, DescribesARankByItsAxes) {
  EXPECT_EQ(Mesh({.tp = 2, .dp = 2, .pp = 2, .ep = 2}).describe(5), "rank 5 (pp 1, dp 0, tp 1, ep 1)");
  EXPECT_EQ(Mesh({.tp = 3, .dp = 2, .ep = 2, .etp = 3}).describe(4), "rank 4 (dp 1, tp 1, ep 1, etp 1)");
  EXPECT_EQ(Mesh(MeshSizes{}).describe(0), "rank 0");
}

TEST(Mesh, TellsALayoutInALine) {
  EXPECT_EQ(mesh_text({.tp = 2, .dp = 2, .pp = 2, .ep = 4}), "8: tp 2, pp 2, dp 2; experts ep 4");
  EXPECT_EQ(mesh_text({.dp = 3}), "3: dp 3");
  EXPECT_EQ(mesh_text({.tp = 2, .etp = 2}), "2: tp 2; experts etp 2");
  EXPECT_EQ(mesh_text({}), "1");
}

TEST(Mesh, RefusesSizesThatDoNotFold) {
  EXPECT_THROW(Mesh({.tp = 2, .dp = 3, .ep = 4}), Bug);
  EXPECT_THROW(Mesh({.tp = 2, .dp = 2, .ep = 2, .etp = 4}), Bug);
  EXPECT_THROW(Mesh({.tp = 0}), Bug);
  EXPECT_THROW(Mesh(MeshSizes{}).place(1), Bug);
}

}  // namespace
}  // namespace concerto
