// SIGINT (Ctrl-C) and SIGTERM end a run cleanly, whatever it is at.
#pragma once

namespace concerto {

// What the first signal means; it changes as a run goes on.
enum class StopMeans {
  kQuit,  // there is nothing to save yet: the process says so and ends at once with 128 + the signal's number
  kSave,  // a request: the step ends, the state is saved
  kCut,   // a request: all is saved, what is still shown is cut off
};

// While one lives, and but for kQuit, the first SIGINT or SIGTERM only sets a flag; a second SIGINT ends the process at
// once with exit code 130, without saving. SIGTERM is never more than a request: batch systems may repeat it. SIGUSR1
// means the same, since it is what mpirun passes on to its ranks without ending them. Two
// SIGINT within 50 ms count as one, since launchers pass on a Ctrl-C that the terminal also sent. One at a time;
// earlier handlers are back after it.
class StopSignals {
 public:
  explicit StopSignals(StopMeans means = StopMeans::kSave);
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

  static void set(StopMeans means);  // from now on
  // The number of the signal that asked to stop; 0: none. Cheap enough to ask every step, from any thread.
  static int requested();
};

}  // namespace concerto
