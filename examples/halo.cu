// Ring halo exchange. A periodic grid is divided into bands of rows, one per rank. In each step, a rank puts its first
// and last row into its neighbours' halo rows, waits for theirs, and replaces every cell by the mean of its neighbours.
// The kernel runs all steps without the host. At the end, each rank compares its band with the whole grid, which it
// computes alone.
#include "example.h"

#include <cmath>
#include <vector>

using namespace ferrogin;

constexpr int ROWS = 16, COLUMNS = 64, STEPS = 100;
constexpr uint64_t ROW = COLUMNS * sizeof(float);
// A band with a halo row above and below. There are two: a step reads one and writes the other, so the rows that a
// neighbour puts for the next step never overwrite rows that this step reads.
constexpr int BAND = (ROWS + 2) * COLUMNS;

enum : uint32_t { FROM_ABOVE, FROM_BELOW, SIGNALS };

FGIN_API float mean(const float* band, int row, int column) {
  int left = (column + COLUMNS - 1) % COLUMNS, right = (column + 1) % COLUMNS;
  return (band[(row - 1) * COLUMNS + column] + band[(row + 1) * COLUMNS + column] + band[row * COLUMNS + left] +
          band[row * COLUMNS + right]) / 4;
}

KERNEL smooth(Outcome* outcome, void* handle, fgin_window window, float* bands, uint32_t above, uint32_t below) {
  Gin<Sharing::Cta> gin(handle, 0);
  Block block;
  for (int step = 0; step < STEPS; step++) {
    const float* now = bands + step % 2 * BAND;
    float* next = bands + (step + 1) % 2 * BAND;
    uint64_t at = uint64_t(step % 2) * BAND * sizeof(float);
    // The first row goes to the halo below the rank above, and the last row to the halo above the rank below.
    TRY(gin.put(above, window, at + (ROWS + 1) * ROW, window, at + ROW, ROW, SignalInc{FROM_BELOW}, None{}, block));
    TRY(gin.put(below, window, at, window, at + ROWS * ROW, ROW, SignalInc{FROM_ABOVE}, None{}, block));
    TRY(gin.waitSignal(FROM_ABOVE, step + 1, block));
    TRY(gin.waitSignal(FROM_BELOW, step + 1, block));
    for (int cell = block.thread_rank(); cell < ROWS * COLUMNS; cell += block.size()) {
      next[COLUMNS + cell] = mean(now, 1 + cell / COLUMNS, cell % COLUMNS);
    }
    // The next step overwrites the rows that were put.
    TRY(gin.flush(block));
  }
}

// A cell of the whole grid before the first step.
static float initial(int row, int column) {
  return std::sin(0.3f * row) + std::cos(0.7f * column * row);
}

// The whole grid after all steps, with halo rows.
static std::vector<float> computed_alone(int rows) {
  std::vector<float> grid((rows + 2) * COLUMNS), next(grid.size());
  for (int i = 0; i < rows * COLUMNS; i++) grid[COLUMNS + i] = initial(i / COLUMNS, i % COLUMNS);
  for (int step = 0; step < STEPS; step++) {
    for (int column = 0; column < COLUMNS; column++) {
      grid[column] = grid[rows * COLUMNS + column];
      grid[(rows + 1) * COLUMNS + column] = grid[COLUMNS + column];
    }
    for (int i = 0; i < rows * COLUMNS; i++) next[COLUMNS + i] = mean(grid.data(), 1 + i / COLUMNS, i % COLUMNS);
    grid.swap(next);
  }
  return grid;
}

int main() try {
  auto comm = Comm::open();
  int rank = comm.rank(), ranks = comm.ranks();
  auto window = comm.allocate(2 * BAND * sizeof(float), Memory::Host);
  ContextOptions options;
  options.signals = SIGNALS;
  auto context = comm.context(options);

  auto* bands = static_cast<float*>(window.host_address());
  for (int i = 0; i < ROWS * COLUMNS; i++) bands[COLUMNS + i] = initial(rank * ROWS + i / COLUMNS, i % COLUMNS);
  uint32_t above = (rank + ranks - 1) % ranks, below = (rank + 1) % ranks;
  LAUNCH(smooth, context, window.handle(), static_cast<float*>(window.address()), above, below);
  context.check();

  std::vector<float> expected = computed_alone(ranks * ROWS);
  int wrong = 0;
  for (int i = 0; i < ROWS * COLUMNS; i++) {
    float found = bands[STEPS % 2 * BAND + COLUMNS + i];
    wrong += !(std::fabs(found - expected[COLUMNS + rank * ROWS * COLUMNS + i]) <= 1e-5f);
  }
  std::printf("rank %d of %d: %d steps, %d of %d cells differ\n", rank, ranks, STEPS, wrong, ROWS * COLUMNS);
  comm.barrier();
  return wrong != 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
