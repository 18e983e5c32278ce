// `concerto checkpoint inspect | verify | export | import`: looks into model folders, checkpoints and run folders,
// checks them, converts between them.
#pragma once

namespace CLI {
class App;
}

namespace concerto {

void add_checkpoint_command(CLI::App& app);

}  // namespace concerto
