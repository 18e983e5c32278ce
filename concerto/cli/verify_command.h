// `concerto verify`: compare a model with a recorded reference, tensor by tensor.
#pragma once

namespace CLI {
class App;
}

namespace concerto {
void add_verify_command(CLI::App& app);
}  // namespace concerto
