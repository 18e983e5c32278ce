#include "concerto/base/hash.h"

#include <gtest/gtest.h>

#include <string>

namespace concerto {
namespace {

TEST(Hash, KnownAnswersOfXxh64) {
  EXPECT_EQ(hash64(""), 0xef46db3751d8e999u);
  EXPECT_EQ(hash64("a"), 0xd24ec4f1a98c6e5bu);
  EXPECT_EQ(hash64("abc"), 0x44bc2cf5ad770999u);
  EXPECT_EQ(hash64("Nobody inspects the spammish repetition"), 0xfbcea83c8a378bf1u);
}

TEST(Hash, KnownAnswersOfFnv1a) {
  EXPECT_EQ(fnv1a("a", kFnvBasis), 0xaf63dc4c8601ec8cu);
  EXPECT_EQ(fnv1a("foobar", kFnvBasis), 0x85944171f73967e8u);
  EXPECT_EQ(fnv1a("bar", fnv1a("foo", kFnvBasis)), fnv1a("foobar", kFnvBasis));
}

TEST(Hash, PiecesGiveTheHashOfTheWhole) {
  std::string text;
  for (int i = 0; i < 300; ++i) text += static_cast<char>(i * 7);
  for (size_t n = 0; n <= text.size(); ++n)
    for (size_t piece : {1, 3, 31, 32, 33, 100}) {
      Hash64 hash;
      for (size_t at = 0; at < n; at += piece) hash.update(text.data() + at, std::min(piece, n - at));
      ASSERT_EQ(hash.digest(), hash64(text.data(), n)) << n << " in " << piece;
    }
}

TEST(Hash, EveryBitCounts) {
  std::string text(77, 'x');
  const uint64_t before = hash64(text);
  for (size_t i = 0; i < text.size() * 8; ++i) {
    text[i / 8] ^= static_cast<char>(1 << (i % 8));
    EXPECT_NE(hash64(text), before);
    text[i / 8] ^= static_cast<char>(1 << (i % 8));
  }
}

TEST(Hash, TextRoundTrip) {
  EXPECT_EQ(hash_text(0x1234), "xxh64:0000000000001234");
  EXPECT_EQ(parse_hash_text(hash_text(~uint64_t{0})), ~uint64_t{0});
  for (const char* bad : {"", "xxh64:", "md5:0000000000001234", "xxh64:000000000000123", "xxh64:000000000000123g",
                          "xxh64:00000000000000AB"})
    EXPECT_FALSE(parse_hash_text(bad)) << bad;
}

}  // namespace
}  // namespace concerto
