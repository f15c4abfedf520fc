// The script of every page: starts the modules that the page needs.
import * as actions from "./actions.js";
import * as figures from "./figures.js";
import * as keys from "./keys.js";
import * as live from "./live.js";
import * as menus from "./menus.js";
import * as themeSwitch from "./theme_switch.js";

themeSwitch.start();
menus.start();
actions.start();
figures.start();
keys.start();
live.start();
