// The types of a dashboard as JSON: those of @grafana/schema, with each enumeration as the text or number that it
// stands for, and each panel with the options and fields of its own type.

import type * as common from '@grafana/schema';
import type * as dash from '@grafana/schema/dist/types/raw/dashboard/x/types.gen';
import type * as heatmap from '@grafana/schema/dist/types/raw/composable/heatmap/panelcfg/x/types.gen';
import type * as stat from '@grafana/schema/dist/types/raw/composable/stat/panelcfg/x/types.gen';
import type * as statetimeline from '@grafana/schema/dist/types/raw/composable/statetimeline/panelcfg/x/types.gen';
import type * as table from '@grafana/schema/dist/types/raw/composable/table/panelcfg/x/types.gen';
import type * as text from '@grafana/schema/dist/types/raw/composable/text/panelcfg/x/types.gen';
import type * as timeseries from '@grafana/schema/dist/types/raw/composable/timeseries/panelcfg/x/types.gen';

// An enumeration is not assignable from its value's literal, and a file of JSON has nothing but literals.
type Json<T> = T extends string
  ? `${T}`
  : T extends number
    ? `${T}` extends `${infer N extends number}`
      ? N
      : never
    : T extends boolean | null | undefined
      ? T
      : T extends ReadonlyArray<infer Item>
        ? Array<Json<Item>>
        : T extends object
          ? { [Key in keyof T]: Json<T[Key]> }
          : T;

type Nothing = Record<string, never>;

// What Grafana fills in by itself where a panel leaves it out.
type Defaulted<T, Keys extends keyof T> = Omit<T, Keys> & Partial<Pick<T, Keys>>;

interface DataSource {
  type: 'prometheus';
  uid: '${datasource}';
}

// The query of the Prometheus data source; its types are in a package of their own.
interface Target {
  datasource: DataSource;
  editorMode?: 'builder' | 'code';
  exemplar?: boolean;
  expr: string;
  format?: 'heatmap' | 'table' | 'time_series';
  hide?: boolean;
  instant?: boolean;
  interval?: string;
  intervalFactor?: number;
  legendFormat?: string;
  range?: boolean;
  refId: string;
}

interface DataLink {
  targetBlank?: boolean;
  title: string;
  url: string;
}

type Standard = Omit<Json<dash.FieldConfig>, 'custom' | 'links'> & { links?: DataLink[] };

type Property<Custom> =
  | { [Key in keyof Standard]-?: { id: Key; value: NonNullable<Standard[Key]> } }[keyof Standard]
  | {
      [Key in keyof Custom]-?: Key extends string ? { id: `custom.${Key}`; value: NonNullable<Custom[Key]> } : never;
    }[keyof Custom];

type Matcher =
  | { id: 'byName'; options: string }
  | { id: 'byRegexp'; options: string }
  | { id: 'byFrameRefID'; options: string }
  | { id: 'byType'; options: 'boolean' | 'number' | 'string' | 'time' };

type Transformation = Omit<Json<dash.DataTransformerConfig>, 'id' | 'options'> & {
  id: 'groupBy' | 'joinByField' | 'labelsToFields' | 'merge' | 'organize' | 'reduce' | 'sortBy';
  options: Record<string, unknown>;
};

type Of<Type extends string, Options, Custom> = Omit<
  Json<dash.Panel>,
  'datasource' | 'fieldConfig' | 'gridPos' | 'id' | 'links' | 'options' | 'targets' | 'title' | 'transformations' | 'type'
> & {
  datasource: DataSource;
  fieldConfig: {
    defaults: Standard & { custom?: Custom };
    overrides: Array<{ matcher: Matcher; properties: Property<Custom>[] }>;
  };
  gridPos: Json<dash.GridPos>;
  id: number;
  links?: DataLink[];
  options: Options;
  targets: Target[];
  title: string;
  transformations?: Transformation[];
  type: Type;
};

type TextPanel = Omit<Of<'text', Json<text.Options>, Nothing>, 'datasource' | 'fieldConfig' | 'targets'> & {
  datasource?: DataSource;
  fieldConfig?: { defaults: Standard; overrides: [] };
  targets?: [];
};

export type TypedPanel =
  | Of<'heatmap', Json<heatmap.Options>, Partial<Json<heatmap.FieldConfig>>>
  | Of<'stat', Json<stat.Options>, Nothing>
  | Of<'state-timeline', Defaulted<Json<statetimeline.Options>, never>, Partial<Json<statetimeline.FieldConfig>>>
  | Of<'table', Json<table.Options>, Partial<Json<common.TableFieldOptions>>>
  | Of<'timeseries', Json<timeseries.Options>, Partial<Json<timeseries.FieldConfig>>>
  | TextPanel;

export type PanelType = TypedPanel['type'];
export type PanelOf<Type extends PanelType> = Extract<TypedPanel, { type: Type }>;

type Row = Omit<Json<dash.RowPanel>, 'datasource' | 'gridPos' | 'panels' | 'title'> & {
  gridPos: Json<dash.GridPos>;
  panels: [];
  title: string;
};

type Variable = Omit<Json<dash.VariableModel>, 'datasource' | 'query' | 'type'> &
  (
    | { type: 'datasource'; query: 'prometheus' }
    | { type: 'query'; datasource: DataSource; definition?: string; query: string | { query: string; refId: string; qryType?: number } }
  );

type Annotation = Omit<Json<dash.AnnotationQuery>, 'datasource' | 'target'> & {
  datasource: DataSource | { type: 'grafana'; uid: '-- Grafana --' };
  expr?: string;
  step?: string;
  tagKeys?: string;
  target?: Json<dash.AnnotationTarget> | Target;
  textFormat?: string;
  titleFormat?: string;
  useValueForTime?: boolean | 'on' | '';
};

// A dashboard but for its panels, each of which is checked by the type that it says it has.
export type Frame = Omit<Json<dash.Dashboard>, 'annotations' | 'panels' | 'templating' | 'uid' | 'title'> & {
  annotations: { list: Annotation[] };
  templating: { list: Variable[] };
  title: string;
  uid: string;
};

export type RowPanel = Row;
