// The drafting core as a Python module; rhyme_openrlhf/_drafting.pyi has its types.
//
// Spans take NumPy arrays, or anything that converts to one; writable spans take only arrays of the very type, and
// write into them. Vectors become arrays that own them, without a copy.
//
// Invariants: Python's lock is held in all calls but `build`, because getting the lock back may take longer than a
// step; a Python without the lock takes it for this module, which does not say that it needs none.
// std::invalid_argument becomes a ValueError, std::out_of_range an IndexError.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include "budget.h"
#include "drafter.h"
#include "index.h"

namespace py = pybind11;

namespace pybind11::detail {

template <typename T>
struct type_caster<std::span<const T>> {
    PYBIND11_TYPE_CASTER(std::span<const T>, const_name("ArrayLike"));

    bool load(handle source, bool) {
        if constexpr (std::is_same_v<T, std::int32_t>)
            if (!isinstance<array_t<T>>(source)) return load_wider(source);
        array_ = array_t<T, FLAGS>::ensure(source);
        if (array_) value = {static_cast<const T*>(array_.data()), static_cast<std::size_t>(array_.size())};
        return static_cast<bool>(array_);
    }

private:
    // An integer is never cut to fewer bits.
    static constexpr int FLAGS = array::c_style | (std::is_integral_v<T> ? 0 : array::forcecast);

    bool load_wider(handle source) {
        const auto wide = array_t<std::int64_t, array::c_style>::ensure(source);
        if (!wide) return false;
        copy_.reserve(static_cast<std::size_t>(wide.size()));
        for (const std::int64_t number : std::span(wide.data(), static_cast<std::size_t>(wide.size()))) {
            if (number != static_cast<T>(number)) throw std::invalid_argument("a token has 32 bits");
            copy_.push_back(static_cast<T>(number));
        }
        value = copy_;
        return true;
    }

    array array_;
    std::vector<T> copy_;
};

template <typename T>
struct type_caster<std::span<T>> {
    PYBIND11_TYPE_CASTER(std::span<T>, const_name("NDArray"));

    bool load(handle source, bool) {
        if (!isinstance<array_t<T, array::c_style>>(source)) return false;
        auto array = reinterpret_borrow<array_t<T, array::c_style>>(source);
        value = {array.mutable_data(), static_cast<std::size_t>(array.size())};
        return true;
    }
};

template <typename T>
struct type_caster<std::vector<T>> {
    static constexpr auto name = const_name("NDArray");

    static handle cast(std::vector<T> values, return_value_policy, handle) {
        auto kept = std::make_unique<std::vector<T>>(std::move(values));
        const capsule owner(kept.get(), [](void* vector) { delete static_cast<std::vector<T>*>(vector); });
        const std::vector<T>* owned = kept.release();
        return array_t<T>(static_cast<ssize_t>(owned->size()), owned->data(), owner).release();
    }
};

}  // namespace pybind11::detail

namespace drafting {
namespace {

// An index keeps Python's object of its buffer.
Index open(const py::buffer& buffer) {
    const auto info = std::make_shared<py::buffer_info>(buffer.request());
    if (info->ndim != 1 || info->strides[0] != info->itemsize)
        throw BufferError("a draft index must be a contiguous buffer");
    return Index({static_cast<const std::byte*>(info->ptr), static_cast<std::size_t>(info->size * info->itemsize)},
                 info);
}

using Drafted = std::tuple<std::vector<Token>, std::vector<float>, Place>;

// The continuation of the longest match, its confidence, and the length of the match. `repeats` times, so that a
// benchmark does not time the call.
Drafted draft(const Index& index, std::span<const Token> text, Place longest, Place shortest, Place limit,
              int repeats) {
    require(1 <= shortest && shortest <= longest && 0 <= limit,
            "need 1 <= shortest <= longest match, and no negative limit");
    std::vector<Token> tokens(static_cast<std::size_t>(limit));
    std::vector<float> confidence(tokens.size());
    Node node;
    Continuation found;
    for (int time = 0; time < repeats; ++time) {
        node = index.longest_match(text, longest, shortest);
        if (!node.empty()) found = index.walk(node, node.low, index.suffixes[node.low], {}, tokens, confidence);
    }
    tokens.resize(static_cast<std::size_t>(found.size));
    confidence.resize(tokens.size());
    return {std::move(tokens), std::move(confidence), node.length};
}

// The object itself if it is a list or a tuple, else a new list of its elements.
py::object items_of(py::handle sequence) {
    auto list = py::reinterpret_steal<py::object>(PySequence_Fast(sequence.ptr(), "need sequences of tokens"));
    if (!list) throw py::error_already_set();
    return list;
}

// The lengths of Python's sequences of ints, and the elements of all.
std::tuple<std::vector<std::int64_t>, std::vector<Token>> flatten(const py::object& sequences) {
    const py::object all = items_of(sequences);
    std::vector<std::int64_t> counts;
    std::vector<Token> tokens;
    for (Py_ssize_t number = 0; number < PySequence_Fast_GET_SIZE(all.ptr()); ++number) {
        const auto sequence = py::reinterpret_borrow<py::object>(PySequence_Fast_GET_ITEM(all.ptr(), number));
        const py::object list = items_of(sequence);
        const std::size_t before = tokens.size();
        // An element's own code may change the list.
        for (Py_ssize_t place = 0; place < PySequence_Fast_GET_SIZE(list.ptr()); ++place) {
            const auto item = py::reinterpret_borrow<py::object>(PySequence_Fast_GET_ITEM(list.ptr(), place));
            const long token = PyLong_AsLong(item.ptr());
            if (token == -1 && PyErr_Occurred()) throw py::error_already_set();
            if (token != static_cast<Token>(token)) throw std::invalid_argument("a token has 32 bits");
            tokens.push_back(static_cast<Token>(token));
        }
        counts.push_back(static_cast<std::int64_t>(tokens.size() - before));
    }
    return {std::move(counts), std::move(tokens)};
}

// Python's lists of these lengths, filled with the tokens.
py::list split(std::span<const Token> tokens, std::span<const std::int64_t> lengths) {
    py::list lists(lengths.size());
    for (std::size_t number = 0; number < lengths.size(); ++number) {
        if (lengths[number] < 0 || static_cast<std::size_t>(lengths[number]) > tokens.size())
            throw std::invalid_argument("the lengths of some drafts are not those of their tokens");
        py::list list(static_cast<std::size_t>(lengths[number]));
        for (std::int64_t place = 0; place < lengths[number]; ++place)
            PyList_SET_ITEM(list.ptr(), place, PyLong_FromLong(tokens[place]));
        tokens = tokens.subspan(list.size());
        PyList_SET_ITEM(lists.ptr(), static_cast<Py_ssize_t>(number), list.release().ptr());
    }
    return lists;
}

}  // namespace
}  // namespace drafting

PYBIND11_MODULE(_drafting, module) {
    using namespace drafting;
    using py::arg;
    py::register_exception<BufferError>(module, "BufferError", PyExc_ValueError);
    module.attr("NO_SAMPLE") = NO_SAMPLE;
    module.attr("SURE_MATCH") = SURE_MATCH;
    module.attr("INSTRUCTION_SET") = RHYME_INSTRUCTION_SET;
    module.def("build", &build, arg("text"), arg("lengths"), arg("rewards"), arg("earlier") = 0,
               py::call_guard<py::gil_scoped_release>());
    module.def("flatten", &flatten);
    module.def("split", &split);
    module.def("choose", &choose);
    module.def("cut", &cut);
    module.def("estimate", &estimate);
    module.def("learn", &learn);
    module.def(
        "make_isotonic",
        [](std::span<const double> values, std::span<const double> weights,
           py::array_t<float, py::array::c_style>& out) {
            if (out.ndim() < 1) throw std::invalid_argument("need rows");
            const auto width = static_cast<std::size_t>(out.shape(out.ndim() - 1));
            make_isotonic(values, weights, width, {out.mutable_data(), static_cast<std::size_t>(out.size())});
        },
        arg("values"), arg("weights"), arg("out").noconvert());

    py::class_<Index>(module, "Index")
        .def(py::init(&open))
        .def("__len__", &Index::size)
        .def("draft", &draft, arg("text"), arg("longest"), arg("shortest"), arg("limit"), arg("repeats") = 1)
        .def("longest_match", [](const Index& index, std::span<const Token> text, Place longest, Place shortest) {
            require(1 <= shortest && shortest <= longest, "need 1 <= shortest <= longest match");
            const Node node = index.longest_match(text, longest, shortest);
            return std::tuple(node.low, node.high, node.length);
        });

    py::class_<Cursor>(module, "Cursor")
        .def(py::init<>())
        .def("follow",
             [](Cursor& cursor, const Index& index, std::span<const Token> text, Place longest, Place least) {
                 require(1 <= least && least <= longest, "need 1 <= least <= longest match");
                 for (int pass = 0; pass < 3; ++pass)
                     cursor.prefetch_pass(pass, index, static_cast<Place>(text.size()), longest);
                 const auto [node, near] = cursor.follow(index, text, longest, least);
                 return std::tuple(node.low, node.high, node.length, near);
             })
        .def("move_to",
             [](Cursor& cursor, const Index& index, std::size_t place) {
                 if (place >= index.suffixes.size()) throw std::out_of_range("no such suffix");
                 cursor.move_to(index.suffixes[place]);
             })
        .def_property_readonly("at", &Cursor::at)
        .def_property_readonly("length", &Cursor::length);

    py::class_<Shared>(module, "Shared")
        .def(py::init<Place>())
        .def("enter",
             [](Shared& shared, std::span<const Token> text, Token token) { shared.enter(shared.hash(text), token); })
        .def("guess",
             [](const Shared& shared, std::span<const Token> text) {
                 const auto [token, matched, probability] = shared.guess(shared.hash(text));
                 return std::tuple(token, matched, probability);
             })
        .def_property_readonly("memory_bytes", &Shared::memory_bytes);

    py::class_<Drafter>(module, "Drafter")
        .def(py::init([](Place longest, Place shortest, bool siblings, bool own_output, Place window_start,
                         Place window_step, Place window_max, double extend_confidence, double stop_confidence,
                         Place shared_tokens) {
                 const TextRules text{longest, shortest, siblings, own_output};
                 const Rules rules{
                     text, window_start, window_step, window_max, extend_confidence, stop_confidence, shared_tokens};
                 return std::make_unique<Drafter>(rules);
             }),
             py::kw_only(), arg("longest"), arg("shortest"), arg("siblings"), arg("own_output"), arg("window_start"),
             arg("window_step"), arg("window_max"), arg("extend_confidence"), arg("stop_confidence"),
             arg("shared_tokens"))
        .def("install", &Drafter::install)
        .def("forget", &Drafter::forget)
        .def("start", &Drafter::start)
        .def("append", &Drafter::append)
        .def("draft",
             [](Drafter& drafter, std::span<const std::int64_t> samples, bool whole) {
                 Drafts found = drafter.draft(samples, whole);
                 return std::tuple(std::move(found.lengths), std::move(found.tokens), std::move(found.probabilities),
                                   std::move(found.sources), std::move(found.matches), std::move(found.recents));
             })
        .def("verified",
             [](Drafter& drafter, std::span<const std::int64_t> samples, std::span<const std::int64_t> verified,
                std::span<const std::int64_t> accepted) {
                 Attribution found = drafter.verified(samples, verified, accepted);
                 return std::tuple(std::move(found.sources), std::move(found.numbers), std::move(found.accepted));
             })
        .def("computing", &Drafter::computing)
        .def("window", &Drafter::window)
        .def("finish", &Drafter::finish)
        .def_property_readonly("memory_bytes", &Drafter::memory_bytes);
}
