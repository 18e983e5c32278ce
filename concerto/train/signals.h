// SIGINT (Ctrl-C) and SIGTERM ask the training loop to save and end.
#pragma once

namespace concerto {

// While one lives, the first SIGINT or SIGTERM only sets a flag; a second SIGINT ends the process at once with exit
// code 130, without saving. SIGTERM is never more than a request: batch systems may repeat it. Two SIGINT within 50 ms
// count as one, since launchers pass on a Ctrl-C that the terminal also sent. One at a time; earlier handlers are back
// after it.
class StopSignals {
 public:
  StopSignals();
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

  // The number of the signal that asked to stop; 0: none. Cheap enough to ask every step, from any thread.
  static int requested();
};

}  // namespace concerto
