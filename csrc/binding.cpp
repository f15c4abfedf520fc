// The drafting core as a Python module: rhyme_openrlhf/_drafting.pyi says what is in it.
//
// Python's lock is held in all calls but `build`: a step is shorter than getting it back may take. What the core throws
// becomes Python's exceptions: std::invalid_argument a ValueError, std::out_of_range an IndexError.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "budget.h"
#include "drafter.h"
#include "index.h"

namespace py = pybind11;

namespace drafting {
namespace {

// Arrays that come in are converted where they must be; those that are written to must be what they are.
template <typename T>
using In = py::array_t<T, py::array::c_style | py::array::forcecast>;
template <typename T>
using Out = py::array_t<T, py::array::c_style>;

template <typename T, int flags>
std::span<const T> view(const py::array_t<T, flags>& array) {
    return {array.data(), static_cast<std::size_t>(array.size())};
}

template <typename T>
std::span<T> writable(Out<T>& array) {
    return {array.mutable_data(), static_cast<std::size_t>(array.size())};
}

// The vector as an array that owns it.
template <typename T>
py::array_t<T> array_of(std::vector<T>&& values) {
    auto kept = std::make_unique<std::vector<T>>(std::move(values));
    std::vector<T>* owned = kept.release();
    const py::capsule owner(owned, [](void* vector) { delete static_cast<std::vector<T>*>(vector); });
    return py::array_t<T>(static_cast<py::ssize_t>(owned->size()), owned->data(), owner);
}

py::array_t<std::uint8_t> build_buffer(const In<Token>& text, const In<std::int64_t>& lengths,
                                       const In<std::int64_t>& rewards) {
    std::vector<std::byte> made;
    {
        const py::gil_scoped_release unlocked;
        made = build(view(text), view(lengths), view(rewards));
    }
    auto kept = std::make_unique<std::vector<std::byte>>(std::move(made));
    std::vector<std::byte>* owned = kept.release();
    const py::capsule owner(owned, [](void* vector) { delete static_cast<std::vector<std::byte>*>(vector); });
    return py::array_t<std::uint8_t>(static_cast<py::ssize_t>(owned->size()),
                                     reinterpret_cast<std::uint8_t*>(owned->data()), owner);
}

// An index keeps Python's object of its buffer.
Index open(const py::buffer& buffer) {
    const auto info = std::make_shared<py::buffer_info>(buffer.request());
    if (info->ndim != 1 || info->strides[0] != info->itemsize)
        throw BufferError("a draft index must be a contiguous buffer");
    const std::span<const std::byte> bytes(static_cast<const std::byte*>(info->ptr),
                                           static_cast<std::size_t>(info->size * info->itemsize));
    return Index(bytes, info);
}

// What followed the longest match, and how long that was; `repeats` times, so that a benchmark need not time the call.
py::tuple draft_often(const Index& index, const In<Token>& text, Place longest, Place shortest, Place limit,
                      int repeats) {
    if (shortest < 1 || shortest > longest || limit < 0)
        throw std::invalid_argument("need 1 <= shortest <= longest match, and no negative limit");
    std::vector<Token> out(static_cast<std::size_t>(limit));
    std::vector<float> confidence(out.size());
    Node node;
    Walked walked;
    for (int time = 0; time < repeats; ++time) {
        node = index.longest_match(view(text), longest, shortest);
        walked =
            node.length ? index.walk(node, node.low, index.suffixes[node.low], WalkRules{}, out, confidence) : Walked{};
    }
    out.resize(static_cast<std::size_t>(walked.found));
    confidence.resize(out.size());
    return py::make_tuple(array_of(std::move(out)), array_of(std::move(confidence)), node.length);
}

py::tuple node_tuple(const Node& node, Place near) { return py::make_tuple(node.low, node.high, node.length, near); }

// The object itself if it is a list or tuple, else a new list of what it has.
py::object items_of(PyObject* sequence) {
    auto list = py::reinterpret_steal<py::object>(PySequence_Fast(sequence, "need sequences of tokens"));
    if (!list) throw py::error_already_set();
    return list;
}

// Python's sequences of ints, one after the other: how many each has, and all of them.
py::tuple flatten(const py::object& lists) {
    const py::object all = items_of(lists.ptr());
    const Py_ssize_t count = PySequence_Fast_GET_SIZE(all.ptr());
    std::vector<std::int64_t> counts;
    std::vector<Token> tokens;
    counts.reserve(static_cast<std::size_t>(count));
    tokens.reserve(static_cast<std::size_t>(8 * count));
    for (Py_ssize_t number = 0; number < count; ++number) {
        const py::object list = items_of(PySequence_Fast_GET_ITEM(all.ptr(), number));
        const Py_ssize_t size = PySequence_Fast_GET_SIZE(list.ptr());
        for (Py_ssize_t place = 0; place < size; ++place) {
            const long token = PyLong_AsLong(PySequence_Fast_GET_ITEM(list.ptr(), place));
            if (token == -1 && PyErr_Occurred()) throw py::error_already_set();
            if (token != static_cast<Token>(token)) throw std::invalid_argument("a token has 32 bits");
            tokens.push_back(static_cast<Token>(token));
        }
        counts.push_back(size);
    }
    return py::make_tuple(array_of(std::move(counts)), array_of(std::move(tokens)));
}

// Tokens as Python's lists of these lengths.
py::list split(const In<Token>& tokens, const In<std::int64_t>& lengths) {
    const auto all = view(tokens);
    const auto sizes = view(lengths);
    py::list lists(sizes.size());
    std::size_t at = 0;
    for (std::size_t number = 0; number < sizes.size(); ++number) {
        if (sizes[number] < 0 || static_cast<std::size_t>(sizes[number]) > all.size() - at)
            throw std::invalid_argument("the lengths of some drafts are not those of their tokens");
        PyObject* made = PyList_New(sizes[number]);
        if (made == nullptr) throw py::error_already_set();
        for (std::int64_t place = 0; place < sizes[number]; ++place)
            PyList_SET_ITEM(made, place, PyLong_FromLong(all[at++]));
        PyList_SET_ITEM(lists.ptr(), static_cast<Py_ssize_t>(number), made);
    }
    return lists;
}

py::tuple choose_lengths(const In<float>& acceptance, const In<std::int64_t>& lengths, const In<double>& seconds,
                         std::int64_t running, std::int64_t tried) {
    Chosen chosen = choose(view(acceptance), view(lengths), view(seconds), running, tried);
    return py::make_tuple(array_of(std::move(chosen.lengths)), chosen.drafts, chosen.expected);
}

py::array_t<Token> cut_drafts(const In<Token>& tokens, const In<std::int64_t>& lengths, const In<std::int64_t>& taken) {
    return array_of(cut(view(tokens), view(lengths), view(taken)));
}

py::array_t<std::int32_t> cells_of(const In<std::int64_t>& sources, const In<std::int64_t>& matches,
                                   const In<std::int64_t>& recents, const In<std::int64_t>& lengths,
                                   const In<float>& confidences, const In<double>& match_edges,
                                   const In<double>& recent_edges, const In<double>& confidence_edges,
                                   std::size_t table_size) {
    std::vector<std::int32_t> cells(static_cast<std::size_t>(confidences.size()));
    find_cells({view(sources), view(matches), view(recents), view(lengths), view(confidences)},
               {view(match_edges), view(recent_edges), view(confidence_edges)}, table_size, cells);
    return array_of(std::move(cells));
}

std::int64_t learn_cells(Out<double>& offered, Out<double>& accepted, const In<std::int32_t>& cells,
                         const In<std::int64_t>& begins, const In<std::int64_t>& numbers,
                         const In<std::int64_t>& verified, const In<std::int64_t>& hits) {
    return learn(writable(offered), writable(accepted), view(cells), view(begins), view(numbers), view(verified),
                 view(hits));
}

void isotonic_rows(const In<double>& values, const In<double>& weights, Out<float>& out) {
    if (out.ndim() < 1) throw std::invalid_argument("need rows");
    make_isotonic(view(values), view(weights), static_cast<std::size_t>(out.shape(out.ndim() - 1)), writable(out));
}

}  // namespace
}  // namespace drafting

PYBIND11_MODULE(_drafting, module) {
    using namespace drafting;
    py::register_exception<BufferError>(module, "BufferError", PyExc_ValueError);
    module.attr("NO_SAMPLE") = Drafter::NO_SAMPLE;
    module.attr("LEAST_HELPED") = Drafter::LEAST_HELPED;
    module.attr("SURE_MATCH") = SURE_MATCH;
    module.attr("INSTRUCTION_SET") = RHYME_INSTRUCTION_SET;
    module.def("build", &build_buffer);
    module.def("flatten", &flatten);
    module.def("split", &split);
    module.def("choose", &choose_lengths);
    module.def("cut", &cut_drafts);
    module.def("find_cells", &cells_of);
    module.def("learn", &learn_cells, py::arg("offered").noconvert(), py::arg("accepted").noconvert(), py::arg("cells"),
               py::arg("begins"), py::arg("numbers"), py::arg("verified"), py::arg("hits"));
    module.def("make_isotonic", &isotonic_rows, py::arg("values"), py::arg("weights"), py::arg("out").noconvert());

    py::class_<Index>(module, "Index")
        .def(py::init(&open))
        .def("__len__", &Index::size)
        .def("draft", [](const Index& index, const In<Token>& text, Place longest, Place shortest,
                         Place limit) { return draft_often(index, text, longest, shortest, limit, 1); })
        .def("draft_often", &draft_often)
        .def("longest_match", [](const Index& index, const In<Token>& text, Place longest, Place shortest) {
            const Node node = index.longest_match(view(text), longest, shortest);
            return node_tuple(node, node.low);
        });

    py::class_<Cursor>(module, "Cursor")
        .def(py::init<>())
        .def("follow",
             [](Cursor& cursor, const Index& index, const In<Token>& text, Place longest, Place least) {
                 const auto count = static_cast<Place>(text.size());
                 cursor.foresee_text(index, count, longest);
                 cursor.foresee_node(index, count, longest);
                 cursor.foresee_branch(index, count, longest);
                 const auto [node, near] = cursor.follow(index, view(text), longest, least);
                 return node_tuple(node, near);
             })
        .def("move_to",
             [](Cursor& cursor, const Index& index, std::size_t place) {
                 if (place >= index.suffixes.size()) throw std::out_of_range("no such suffix");
                 cursor.move_to(index.suffixes[place]);
             })
        .def_property_readonly("at", &Cursor::at)
        .def_property_readonly("length", &Cursor::length);

    py::class_<Drafter>(module, "Drafter")
        .def(py::init([](Place longest, Place shortest, bool siblings, bool own_output, Place window_start,
                         Place window_step, Place window_max, double extend_confidence, double stop_confidence,
                         int helpers) {
                 const Rules rules{{longest, shortest, siblings, own_output},
                                   window_start,
                                   window_step,
                                   window_max,
                                   extend_confidence,
                                   stop_confidence};
                 return std::make_unique<Drafter>(rules, helpers);
             }),
             py::kw_only(), py::arg("longest"), py::arg("shortest"), py::arg("siblings"), py::arg("own_output"),
             py::arg("window_start"), py::arg("window_step"), py::arg("window_max"), py::arg("extend_confidence"),
             py::arg("stop_confidence"), py::arg("helpers"))
        .def("install", &Drafter::install)
        .def("forget", &Drafter::forget)
        .def("start",
             [](Drafter& drafter, const std::string& prompt, const In<Token>& tokens, Place prompt_tokens,
                Place most_tokens,
                Place window) { return drafter.start(prompt, view(tokens), prompt_tokens, most_tokens, window); })
        .def("append", [](Drafter& drafter, const In<std::int64_t>& samples, const In<std::int64_t>& counts,
                          const In<Token>& tokens) { drafter.append(view(samples), view(counts), view(tokens)); })
        .def("draft",
             [](Drafter& drafter, const In<std::int64_t>& samples, bool whole) {
                 Drafts drafts = drafter.draft(view(samples), whole);
                 return py::make_tuple(array_of(std::move(drafts.lengths)), array_of(std::move(drafts.tokens)),
                                       array_of(std::move(drafts.probabilities)), array_of(std::move(drafts.sources)),
                                       array_of(std::move(drafts.matches)), array_of(std::move(drafts.recents)));
             })
        .def("verified",
             [](Drafter& drafter, const In<std::int64_t>& samples, const In<std::int64_t>& verified,
                const In<std::int64_t>& accepted) {
                 Came came = drafter.verified(view(samples), view(verified), view(accepted));
                 return py::make_tuple(came.sources, array_of(std::move(came.numbers)), came.accepted);
             })
        .def("window", &Drafter::window)
        .def("finish", &Drafter::finish)
        .def_property_readonly("memory_bytes", &Drafter::memory_bytes);
}
