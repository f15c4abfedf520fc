// The Config tab: search in a run's settings.
import { fold } from "./option_search.js";

const settings = document.querySelector("[data-settings]");
if (settings.querySelector("[data-search]")) fold.start(settings);
