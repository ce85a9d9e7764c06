// Loaded into standing processes. While MPI waits it calls sched_yield again and again; where whatever could run waits
// too, that keeps all cores busy. Tests run more ranks than there are cores, and most of their time they wait.
#include <ctime>

extern "C" int sched_yield() {
    const timespec moment = {0, 200'000};
    nanosleep(&moment, nullptr);
    return 0;
}
