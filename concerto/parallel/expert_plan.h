// Who sends which rows to whom when the experts of a layer live on several ranks: arithmetic on the counts of one
// micro-batch, no communication. Made once a micro-batch; forward, backward and recompute replay it.
//
// The dispatch group has ep * etp ranks, ep slow. A row goes to every etp rank of its expert's ep rank; each computes
// its slice of the expert's width, and the sender adds up what comes back.
//
// Orders of rows
//   sent      by (ep rank, expert, (token, slot)): what the sender holds; dropped choices behind, which never travel
//   received  by (sender, expert, (token, slot)): as they arrive
//   sorted    by (expert, sender, (token, slot)): what the experts' products see: (global token, slot) order within an
//             expert, when the senders hold the tokens in the order of their ranks
//   back      etp copies of the sent rows, one from each etp rank, then the dropped
//
// Rounds: where the rows that come to a rank are more than a bound, what each sender has for it is cut into as many
// equal parts as keep every rank's share of a round within the bound; round i takes part i of everybody. All ranks use
// the same number.
#pragma once

#include <span>
#include <vector>

#include "concerto/arch/shard.h"
#include "concerto/base/part.h"
#include "concerto/tensor/arena.h"

namespace concerto {

// The experts of each rank of the dispatch group.
struct ExpertPlaces {
  int ep = 1, etp = 1;
  std::vector<std::vector<int>> experts;  // [ep] ids, ascending
  std::vector<int64_t> first;             // [ep + 1] where a rank's experts begin among all, sorted by (ep rank, id)
  int ranks() const { return ep * etp; }
  int64_t count(int ep_rank) const { return static_cast<int64_t>(experts[static_cast<size_t>(ep_rank)].size()); }
  int64_t total() const { return first.back(); }
};
ExpertPlaces expert_places(const ModelConfig& config, const ShardPlan& plan);

// What comes to a rank's L experts in one round.
struct ExpertRound {
  int64_t received = 0;  // R
  View begin;            // [ranks + 1] i64 in `received`
  View offsets;          // [L + 1] i32 in `sorted`
  View received_row;     // [R] i32: sorted -> received
  View sorted_row;       // [R] i32: received -> sorted
};

// The plan of one micro-batch, and what is on its way. Only bytes, so that it can lie in Saved; the arrays lie in
// Saved::keep. In a dry run there are no arrays, and `kept` and `received` are what is planned for.
struct ExpertTravel {
  int64_t kept = 0, dropped = 0;  // rows of this rank's tokens
  int64_t rounds = 1;
  // Of this rank's tokens:
  View send_counts;  // [E] i32 rows of each expert, experts sorted by (ep rank, id)
  View send_begin;   // [ep + 1] i64 in `sent`
  View send_token;   // [T * K] i32 the token of a row; `sent`
  View send_row;     // [T, K] i32 the row of a (token, slot); `sent`
  View back_row;     // [T, K * etp] i32 its rows in `back`; with etp 1 the same as send_row
  // Of the rows that come to this rank's L experts:
  View recv_counts;   // [ranks, L] i32, in all rounds
  ExpertRound first;  // round 0; later ones are planned again when they are played
  // Sent, in backward again by later rounds:
  View x, slots;            // [T, H], [T, K] of the tokens
  View sent, sent_weights;  // [kept, H], [T * K] the same as rows
  // Under way:
  View rows, weights;  // of either direction
  int64_t rows_ticket = 0, weights_ticket = 0;

  int64_t back_rows(int etp) const { return kept * etp + dropped; }
  // The rows of `sent` that go to an ep rank in a round.
  Part sent_part(int64_t ep_rank, int64_t round) const;
};

// This rank's half of the plan, before the counts are exchanged. `offsets`, `row_token`, `row_of`: of all experts, by
// id (layers/router_segments.h).
void plan_sent_rows(const ExpertPlaces& places, View offsets, View row_token, View row_of, Arena& keep, Arena& scratch,
                    bool dry_run, ExpertTravel& travel);
// The rounds that this rank needs to get no more than `most_rows` rows in any of them; 0: no bound. `counts`: [ranks, L].
int64_t rounds_needed(const ExpertPlaces& places, View counts, int64_t most_rows);
// The other half, once counts and rounds are known: of one round. In a dry run `planned` rows.
ExpertRound plan_round(const ExpertPlaces& places, const ExpertTravel& travel, int64_t round, Arena& arena,
                       bool dry_run, int64_t planned);

// Rows to plan for at `local` experts, if each rank has at most `tokens` tokens: every token chooses as many of them as
// it can; or (usual) half as many again as with equal loads.
int64_t most_received_rows(const ExpertPlaces& places, int64_t local, int64_t tokens, int64_t top_k);
int64_t usual_received_rows(const ExpertPlaces& places, int64_t local, int64_t tokens, int64_t top_k);

}  // namespace concerto
