// The scan on a processor, and the whole mixer around it, each with its gradient: the functions of the library.
//
// A level fills segments (segment.h, where the equations are) and takes their results: the scan from given coefficients
// (scan.h), the mixer from the projections of the block's input (mixer.h), a step from the input of a block itself
// (step.h). A unit of work (a row and some heads of it) is computed by one thread in one order, and sums over units are
// taken in the order of the units: no result depends on the number of threads.
//
// source.py joins these files, since a checkpoint holds Python files only.

#include <cstdint>
#include <exception>
#include <type_traits>

#include "delta.h"
#include "delta_parts.h"
#include "memory.h"
#include "mixer.h"
#include "mixer_parts.h"
#include "scan.h"
#include "segment.h"
#include "step.h"
#include "swiglu.h"
#include "work.h"

// A library is for one type of what the projections make and take, and for the scan and the Mamba-3 mixers or for the
// delta family: all at once would take several times as long to compile, and most processes need one.
#ifndef ELEMENT
#define ELEMENT float
#endif
using Element = ELEMENT;
using Inside = std::conditional_t<std::is_same_v<Element, BFloat16>, float, Element>;

// What the functions return: 0, or 1 if there was not memory enough, which is all that can go wrong in them.
template <typename Function>
static int failed(const Function& function) {
    try {
        function();
        return 0;
    } catch (const std::exception&) {
        return 1;
    }
}

extern "C" {
#ifndef DELTA_FAMILY
int scan_forward(const Scan<Element, Inside>* scan) {
    return failed([&] { run(*scan, true); });
}
int scan_backward(const Scan<Element, Inside>* scan) {
    return failed([&] { run(*scan, false); });
}
int mixer_forward(const Mixer<Element, Inside>* mixer) {
    return failed([&] { run(*mixer, true); });
}
int mixer_backward(const Mixer<Element, Inside>* mixer) {
    return failed([&] { run(*mixer, false); });
}
int mixer_step(const MixerStep<Inside>* a) {
    return failed([&] {
        if constexpr (std::is_same_v<Element, Inside>) step(*a);
    });
}
// Returns 2 where a number is not finite.
int policy_step(const PolicyStep<Inside>* a, const Inside* observations, Inside* const* states, Inside* actions) {
    bool finite = false;
    const int failure = failed([&] {
        if constexpr (std::is_same_v<Element, Inside>) finite = step(*a, observations, states, actions);
    });
    return failure ? failure : (finite ? 0 : 2);
}
int64_t scan_segment() { return kSegment; }
int64_t scan_bytes() { return sizeof(Scan<Element, Inside>); }
int64_t mixer_bytes() { return sizeof(Mixer<Element, Inside>); }
int64_t mixer_step_bytes() { return sizeof(MixerStep<Inside>); }
int64_t policy_step_bytes() { return sizeof(PolicyStep<Inside>); }
#else
int delta_forward(const Delta<Element, Inside>* delta) {
    return failed([&] { run(*delta, true); });
}
int delta_backward(const Delta<Element, Inside>* delta) {
    return failed([&] { run(*delta, false); });
}
int swiglu_forward(const SwiGLU<Element, Inside>* network) {
    return failed([&] { run(*network, true); });
}
int swiglu_backward(const SwiGLU<Element, Inside>* network) {
    return failed([&] { run(*network, false); });
}
int64_t delta_segment(int64_t steps) { return delta_segment_tokens(steps); }
int64_t delta_bytes() { return sizeof(Delta<Element, Inside>); }
int64_t swiglu_bytes() { return sizeof(SwiGLU<Element, Inside>); }
#endif
void use_pool(Pool given) { pool = given; }
}
